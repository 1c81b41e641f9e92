"""Passes over the loop IR: golden graphs before and after each, and the same bits after all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tvm import relax
from tvm.relax import Tuple, op

from bridge.base.session import SESSION
from bridge.compile import compile_function, pipeline
from bridge.compile.cpu.backend import host_backend
from bridge.compile.loop_ir.graph import Graph, eliminate_dead_code
from bridge.compile.passes.choose_layouts import choose_layouts, make_walkable, recompute_permutations
from bridge.compile.passes.sections import recompute_sections, recompute_slices
from bridge.compile.translate import translate
from tests.bridge.compile.graph_text import text
from tests.bridge.compile.random_functions import build, draw, sample
from tests.bridge.compile_helpers import function, run
from tests.sampling import sampled


def translated(params: list[tuple], body: Callable) -> Graph:
    backend = host_backend()
    func = function([(shape, "float32") for shape in params], body)
    return choose_layouts(translate(func, backend), backend, backend.products(1, False))


def part(emit: Callable, x: relax.Expr, axis: int, begin: int, end: int) -> relax.Var:
    return emit(op.strided_slice(x, [axis], [begin], [end]))


def halves(emit: Callable, x: relax.Expr, b: relax.Expr) -> list[relax.Var]:
    y = emit(op.add(x, b))
    return [emit(op.exp(part(emit, y, 1, 0, 4))), emit(op.negative(part(emit, y, 1, 4, 8)))]


def transposed(emit: Callable, x: relax.Expr, b: relax.Expr) -> list[relax.Var]:
    y = emit(op.permute_dims(emit(op.add(x, b)), [1, 0]))
    return [emit(op.exp(emit(op.reshape(y, [32]))))]


def gates(emit: Callable, x: relax.Expr, y: relax.Expr) -> list[relax.Var]:
    parts = [emit(op.negative(x)), emit(op.tanh(y))]
    return [emit(op.concat(Tuple(parts), axis=1))]


def turned_rows(emit: Callable, x: relax.Expr) -> list[relax.Var]:
    turned = emit(op.permute_dims(x, [0, 2, 1]))
    return [emit(op.sum(turned, [1, 2])), emit(op.max(turned, [1, 2]))]


def nine_axes(emit: Callable, x: relax.Expr) -> list[relax.Var]:
    return [emit(op.negative(emit(op.permute_dims(x)))), emit(op.exp(x))]


def two_large(emit: Callable, x: relax.Expr, y: relax.Expr) -> list[relax.Var]:
    return [emit(op.exp(part(emit, emit(op.add(x, y)), 1, 0, 4)))]


def two_large_read_whole(emit: Callable, x: relax.Expr, y: relax.Expr) -> list[relax.Var]:
    added = emit(op.add(x, y))
    return [emit(op.exp(part(emit, added, 1, 0, 4))), added]


def one_row(emit: Callable, x: relax.Expr, y: relax.Expr) -> list[relax.Var]:
    return [emit(op.multiply(y, part(emit, emit(op.negative(x)), 0, 0, 1)))]


GOLDEN = [
    (
        recompute_slices,
        halves,
        [(8, 8), (8,)],
        ["0 = add(p0, p1[8,8:0,1+0])", "1 = exp(0[8,4:8,1+0])", "2 = negative(0[8,4:8,1+4])", "return 1, 2"],
        [
            "0 = add(p0[8,4:8,1+0], p1[8,4:0,1+0])",
            "1 = exp(0)",
            "2 = add(p0[8,4:8,1+4], p1[8,4:0,1+4])",
            "3 = negative(2)",
            "return 1, 3",
        ],
    ),
    (  # no element is added twice
        recompute_slices,
        two_large,
        [(8, 8), (8, 8)],
        ["0 = add(p0, p1)", "1 = exp(0[8,4:8,1+0])", "return 1"],
        ["0 = add(p0[8,4:8,1+0], p1[8,4:8,1+0])", "1 = exp(0)", "return 1"],
    ),
    (  # more would be read than the sum
        recompute_slices,
        two_large_read_whole,
        [(8, 8), (8, 8)],
        ["0 = add(p0, p1)", "1 = exp(0[8,4:8,1+0])", "return 1, 0"],
        ["0 = add(p0, p1)", "1 = exp(0[8,4:8,1+0])", "return 1, 0"],
    ),
    (  # a row for all rows would be a kernel of its own
        recompute_slices,
        one_row,
        [(8, 8), (8, 8)],
        ["0 = negative(p0)", "1 = multiply(p1, 0[8,8:0,1+0])", "return 1"],
        ["0 = negative(p0)", "1 = multiply(p1, 0[8,8:0,1+0])", "return 1"],
    ),
    (
        recompute_permutations,
        transposed,
        [(8, 4), (4,)],
        ["0 = add(p0, p1[8,4:0,1+0])", "1 = copy(0[4,8:1,4+0])", "2 = exp(1[32:1+0])", "return 2"],
        ["0 = add(p0[4,8:1,4+0], p1[4,8:1,0+0])", "1 = exp(0[32:1+0])", "return 1"],
    ),
    (  # tanh is not cheap
        recompute_sections,
        gates,
        [(8, 16), (8, 16)],
        ["0 = negative(p0)", "1 = tanh(p1)", "2 = concat(0[8,2,16:16,0,1+0], 1[8,2,16:16,0,1+0])", "return 2"],
        ["0 = tanh(p1)", "1 = negative(p0[8,2,16:16,0,1+0])", "2 = concat(1, 0[8,2,16:16,0,1+0])", "return 2"],
    ),
    (
        make_walkable,
        turned_rows,
        [(4, 6, 5)],
        ["0 = sum(p0[4,5,6:30,1,5+0])", "1 = max(p0[4,5,6:30,1,5+0])", "return 0, 1"],
        ["0 = copy(p0[4,5,6:30,1,5+0])", "1 = sum(0)", "2 = max(0)", "return 1, 2"],
    ),
    (
        make_walkable,
        nine_axes,
        [(2,) * 9],
        ["0 = negative(p0[2,2,2,2,2,2,2,2,2:1,2,4,8,16,32,64,128,256+0])", "1 = exp(p0)", "return 0, 1"],
        [
            "0 = library copy(p0[2,2,2,2,2,2,2,2,2:1,2,4,8,16,32,64,128,256+0])",
            "1 = negative(0)",
            "2 = exp(p0)",
            "return 1, 2",
        ],
    ),
]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case[0].__name__}-{case[1].__name__}")
def test_golden(case):
    """The translator's graph, one node an operator, and the pass's result, without dead code."""
    transform, body, params, before, expected = case
    graph = translated(params, body)
    assert text(graph) == before
    assert text(eliminate_dead_code(transform(graph, host_backend()), host_backend())) == expected


@pytest.mark.parametrize("seed", sampled(range(6), range(3)))
def test_no_pass_changes_a_bit(seed, monkeypatch):
    inputs, steps = draw(seed, 24)
    relax_function = build(inputs, steps, "float32", [len(inputs) + len(steps) - k for k in (1, 4, 9)])
    tensors = sample(inputs, torch.float32, seed)
    optimized = compile_function(relax_function, name="optimized")(tensors)
    SESSION.reset("programs")
    monkeypatch.setattr(pipeline, "PASSES", (make_walkable,))
    plain = compile_function(relax_function, name="plain")(tensors)
    SESSION.reset("programs")
    for ours, theirs in zip(optimized, plain, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_copies_of_zeros_of_both_signs_are_two():
    (y,) = run(
        [torch.ones(1)],
        lambda emit, x: [
            emit(
                op.concat(Tuple([emit(op.full((1, 3), relax.const(zero), "float32")) for zero in (0.0, -0.0)]), axis=0)
            )
        ],
    )
    assert torch.equal(torch.signbit(y), torch.tensor([[False] * 3, [True] * 3]))
