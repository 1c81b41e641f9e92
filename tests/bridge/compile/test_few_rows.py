"""Sums of few long rows as additions: the bits of the reduction, and no launch of their own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tvm.relax import op

from bridge.compile import Launch, Program, compile_function
from bridge.compile.cpu.backend import host_backend
from bridge.compile.cuda.limits import ORDER
from tests.bridge.compile_helpers import current_options, function
from tests.sampling import sampled


def compiled(made, rows: int) -> Program:
    """For this processor, which adds up to so many rows in the place of a reduction, of any size."""
    backend = host_backend()
    limits = backend.limits.having(added_rows=rows, single_elements=1)
    order = replace(backend.order, whole_rows=64, whole_columns=1)
    options = replace(current_options(), backend=replace(backend, limits=limits, order=order))
    return compile_function(made, name=f"rows{rows}", options=options)


def reductions(program: Program) -> int:
    return sum("sum" in step.ops for step in program.steps if isinstance(step, Launch))


AXES, TYPES = ([1], [1, 2], [0], [0, 1]), ("float32", "bfloat16", "float64")
ALWAYS = [([1], "float32"), ([1], "bfloat16"), ([1, 2], "float64"), ([0], "bfloat16"), ([0, 1], "float32")]


@pytest.mark.parametrize(("axes", "dtype"), sampled(itertools.product(AXES, TYPES), ALWAYS), ids=str)
def test_no_bit_changes(axes, dtype):
    def body(emit, x, y):
        total = emit(op.sum(emit(op.multiply(x, y)), axes))
        return [emit(op.negative(total)), emit(op.sum(x, axes, keepdims=True))]

    made = function([((2, 2, 3, 5, 7), dtype)] * 2, body)
    plain, added = compiled(made, 0), compiled(made, 8)
    assert (reductions(plain) > 0, reductions(added)) == (True, 0)
    x, y = (torch.randn(2, 2, 3, 5, 7).to(getattr(torch, dtype)) for _ in range(2))
    for expected, found in zip(plain([x, y]), added([x, y]), strict=True):
        assert torch.equal(expected, found) and expected.dtype == found.dtype


def test_of_negative_zeros_and_integers():
    made = function([((4, 9), "float32"), ((3, 9), "int64")], lambda emit, x, i: [emit(op.sum(x, [0])), op.sum(i, [0])])
    x, i = torch.full((4, 9), -0.0), torch.arange(27).view(3, 9) << 50
    for expected, found in zip(compiled(made, 0)([x, i]), compiled(made, 8)([x, i]), strict=True):
        assert torch.equal(expected, found) and torch.equal(expected.signbit(), found.signbit())


def test_one_more_row_is_a_reduction():
    made = function([((9, 40), "float32")], lambda emit, x: [emit(op.sum(x, [0]))])
    assert (reductions(compiled(made, 8)), reductions(compiled(made, 9))) == (1, 0)


def test_arithmetic_read_once_is_fused_with_the_sum():
    """Keys that four heads share: their gradient is cast, scaled and added in one launch, and no copy is stored."""
    made = function(
        [((2, 4, 6, 33), "bfloat16"), ((6, 33), "float32")],
        lambda emit, x, y: [emit(op.multiply(emit(op.sum(emit(op.astype(x, "float32")), [1])), y))],
    )
    program = compiled(made, 8)
    assert len([step for step in program.steps if isinstance(step, Launch)]) == 1
    x, y = torch.randn(2, 4, 6, 33).bfloat16(), torch.randn(6, 33)
    torch.testing.assert_close(program([x, y])[0], x.float().sum(1) * y)


def test_few_rows_of_many_columns_are_one_chunk_on_a_gpu():
    assert ORDER.column_chunks(32, 150_000) == 1 and ORDER.column_chunks(2, 65_536) == 1
    assert ORDER.column_chunks(4096, 50_257) > 64 and ORDER.column_chunks(10_496, 768) > 64
