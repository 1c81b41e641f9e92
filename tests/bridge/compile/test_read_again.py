"""Cheap values that kernels compute again from memory: the same bits, and fewer bytes that are moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tvm.relax import const, op

from autodiff.extents import ExtentScope
from bridge.compile import Launch, Program, compile_function
from bridge.compile.cpu.backend import host_backend
from tests.bridge.compile.random_functions import build, draw, sample
from tests.bridge.compile_helpers import current_options, function
from tests.sampling import sampled


def compiled(made, operators: int) -> Program:
    """For this processor, where kernels compute values of so many operators again, of any size."""
    backend = host_backend()
    backend = replace(backend, limits=backend.limits.having(read_again=operators))
    return compile_function(made, name=f"again{operators}", options=replace(current_options(), backend=backend))


def launches(program: Program) -> list[Launch]:
    return [step for step in program.steps if isinstance(step, Launch)]


def normalized(emit, x, weight):
    """Batch normalization over all but the last axis: bfloat16 ``x``, float32 inside → bfloat16."""
    wide = emit(op.astype(x, "float32"))
    centred = emit(op.subtract(wide, emit(op.mean(wide, [0, 1], keepdims=True))))
    variance = emit(op.mean(emit(op.multiply(centred, centred)), [0, 1], keepdims=True))
    scaled = emit(op.multiply(emit(op.multiply(centred, emit(op.rsqrt(variance)))), weight))
    return [emit(op.astype(scaled, "bfloat16"))]


def test_a_normalization_of_half_numbers_stores_none_in_float32():
    made = function([((40, 50, 32), "bfloat16"), ((32,), "float32")], normalized)
    plain, again = compiled(made, 0), compiled(made, 8)
    large = [step.contents.bytes for step in launches(again) if step.contents.bytes > 100_000]
    assert sum(large) < 0.5 * sum(step.contents.bytes for step in launches(plain))
    x, weight = torch.randn(40, 50, 32).bfloat16(), torch.randn(32)
    assert torch.equal(plain([x, weight])[0], again([x, weight])[0])


def test_rows_that_vary():
    """The sample decides whether a value is large, without a guard."""
    scope = ExtentScope()
    rows = scope.symbol("rows", 2000)

    def body(emit, x, weight):
        wide = emit(op.astype(x, "float32"))
        centred = emit(op.subtract(wide, emit(op.sum(wide, [0], keepdims=True))))
        scaled = emit(op.multiply(centred, emit(op.rsqrt(emit(op.sum(emit(op.square(centred)), [0], keepdims=True))))))
        return [emit(op.astype(emit(op.multiply(scaled, weight)), "bfloat16"))]

    made = function([((rows, 32), "bfloat16"), ((32,), "float32")], body)
    plain, again = compiled(made, 0), compiled(made, 8)
    moved = [sum(step.contents.bytes for step in launches(program)) for program in (plain, again)]
    assert moved[1] < 0.75 * moved[0]
    assert not any("rows" in str(guard) and "2000" in str(guard) for guard in scope.guards)
    for size in (2000, 3, 700):
        tensors = [torch.randn(size, 32).bfloat16(), torch.randn(32)]
        assert torch.equal(plain.at({"rows": size})(tensors)[0], again.at({"rows": size})(tensors)[0])


def test_what_is_written_counts_too():
    """A ReLU's float32 gradient: its two bfloat16 operands have as many bytes, and recomputing it saves the write."""

    def body(emit, output, gradient, weight):
        masked = emit(op.where(emit(op.less_equal(output, const(0, "bfloat16"))), const(0, "bfloat16"), gradient))
        scaled = emit(op.multiply(emit(op.astype(masked, "float32")), weight))
        centred = emit(op.subtract(scaled, emit(op.mean(scaled, [0, 1], keepdims=True))))
        return [emit(op.astype(centred, "bfloat16"))]

    made = function([((40, 50, 32), "bfloat16")] * 2 + [((32,), "float32")], body)
    plain, again = compiled(made, 0), compiled(made, 8)
    moved = [sum(step.contents.bytes for step in launches(program)) for program in (plain, again)]
    assert moved[1] < 0.75 * moved[0]
    tensors = [torch.randn(40, 50, 32).bfloat16(), torch.randn(40, 50, 32).bfloat16(), torch.randn(32)]
    assert torch.equal(plain(tensors)[0], again(tensors)[0])


def test_what_reads_more_than_it_saves_is_stored():
    """Recomputation would read three tensors in place of one."""

    def body(emit, x, y, z):
        total = emit(op.add(emit(op.add(x, y)), z))
        centred = emit(op.subtract(total, emit(op.mean(total, [0], keepdims=True))))
        return [centred]

    made = function([((300, 40), "float32")] * 3, body)
    plain, again = compiled(made, 0), compiled(made, 8)
    assert list(map(str, launches(plain))) == list(map(str, launches(again)))


@pytest.mark.parametrize("seed", sampled(range(60, 66), range(60, 63)))
def test_no_bit_changes(seed):
    inputs, program = draw(seed, 24)
    made = build(inputs, program, "bfloat16", list(range(len(inputs) + 12, len(inputs) + len(program), 4)))
    tensors = [tensor.bfloat16() for tensor in sample(inputs, torch.float32, seed)]
    for ours, theirs in zip(compiled(made, 8)(tensors), compiled(made, 0)(tensors), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
