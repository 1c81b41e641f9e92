"""Concatenations that are written section by section by the kernels that compute their operands: the same bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from tvm.relax import Tuple, op

from bridge import add_tvm_dispatch, stats
from bridge.compile import CallLibrary, Launch, Program, compile_function
from bridge.compile.cpu.backend import host_backend
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.passes.sections import place_sections
from bridge.compile.runtime.loop_frame import inner_steps
from bridge.compile.translate import translate
from tests.bridge.compile.graph_text import text
from tests.bridge.compile_helpers import current_options, function
from tests.sampling import sampled

SHAPES = [(16, 256), (9, 16), (8, 20), (24, 100), (64, 17)]  # with tails, and rows shorter than a vector's loop


def compiled(made, most: int, **limits: int) -> Program:
    """For this processor, where concatenations of up to so many sections are placed."""
    backend = host_backend()
    backend = replace(backend, limits=backend.limits.having(placed_sections=most, **limits))
    return compile_function(made, name=f"placed{most}", options=replace(current_options(), backend=backend))


def steps(program: Program) -> list[str]:
    return [step.name for step in program.steps if isinstance(step, Launch | CallLibrary)]


def gates(emit, x, y, *_):
    """Three values that depend on one another, each too expensive to recompute."""
    first = emit(op.tanh(emit(op.multiply(x, y))))
    second = emit(op.multiply(first, emit(op.sigmoid(y))))
    return [first, second, emit(op.add(emit(op.exp(second)), x))]


def by_a_product(emit, x, y, weight):
    joined = emit(op.concat(Tuple(gates(emit, x, y)), axis=1))
    return [joined, emit(op.matmul(joined, weight))]


def test_golden():
    def body(emit, x, y):
        parts = [emit(op.tanh(x)), emit(op.exp(y))]
        return [emit(op.concat(Tuple(parts), axis=1))]

    backend = host_backend()
    made = function([((8, 16), "float32")] * 2, body)
    before = choose_layouts(translate(made, backend), backend, backend.products(1, False))
    head = ["0 = tanh(p0)", "1 = exp(p1)"]
    assert text(before) == [*head, "2 = concat(0[8,2,16:16,0,1+0], 1[8,2,16:16,0,1+0])", "return 2"]
    assert text(place_sections(before, backend)) == [*head, "2 = sections(0, 1)", "return 2"]


def test_a_products_operand_is_written_by_the_kernel_that_computes_it():
    made = function([((16, 256), "float32")] * 2 + [((768, 32), "float32")], by_a_product)
    (kernel, _), apart = steps(compiled(made, 8)), steps(compiled(made, 0))
    assert kernel.endswith("concat") and len(apart) == 3


def test_what_a_kernel_reads_is_no_memory_and_stays():
    def body(emit, x, y):
        joined = emit(op.concat(Tuple(gates(emit, x, y)), axis=1))
        return [emit(op.sum(joined, [1])), emit(op.negative(joined))]

    made = function([((16, 256), "float32")] * 2, body)
    assert steps(compiled(made, 8)) == steps(compiled(made, 0))


def of_rows(emit, x, y, weight):
    """Values of rows that are reduced, and one of the sections a result itself."""
    normal = emit(op.nn.softmax(emit(op.add(x, y)), -1))
    parts = [normal, emit(op.multiply(normal, x)), emit(op.tanh(y))]
    return [emit(op.matmul(emit(op.concat(Tuple(parts), axis=1)), weight)), parts[1], emit(op.sum(parts[2], [1]))]


def of_one_value_twice(emit, x, y, weight):
    same = emit(op.tanh(emit(op.multiply(x, y))))
    joined = emit(op.concat(Tuple([same, emit(op.exp(x)), same]), axis=1))
    return [joined, emit(op.matmul(joined, weight))]


def of_rows_of_one(emit, x, y, weight):
    """A section that no kernel computes, and one for all rows: both are not placed."""
    row = emit(op.broadcast_to(emit(op.sum(x, [0], keepdims=True)), [int(extent) for extent in x.ty.shape]))
    return [emit(op.matmul(emit(op.concat(Tuple([emit(op.tanh(x)), y, row]), axis=1)), weight))]


BODIES = [by_a_product, of_rows, of_one_value_twice, of_rows_of_one]
TYPES = ["float32", "float64", "bfloat16"]
#: Each body of each shape, of types by turns; the body that is never placed has three shapes.
ALWAYS = [
    (TYPES[(place + row) % 3], shape, body)
    for row, body in enumerate(BODIES)
    for place, shape in enumerate(SHAPES)
    if body is not of_rows_of_one or place < 3
]


@pytest.mark.parametrize(
    ("dtype", "shape", "body"),
    sampled(itertools.product(TYPES, SHAPES, BODIES), ALWAYS),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_same_bits(body, shape, dtype):
    torch.manual_seed(0)
    columns = shape[1]
    made = function([(shape, dtype), (shape, dtype), ((3 * columns, 5), dtype)], body)
    tensors = [torch.randn(extents).to(getattr(torch, dtype)) for extents in (shape, shape, (3 * columns, 5))]
    apart = compiled(made, 0)(tensors)
    for limits in ({}, {"parallel_work": 1, "tasks": 3}):
        for ours, theirs in zip(compiled(made, 8, **limits)(tensors), apart, strict=True):
            assert torch.equal(ours, theirs)


def test_along_the_first_axis_of_a_batch():
    """Sections of several rows each, behind a batch."""

    def body(emit, x, y):
        joined = emit(op.concat(Tuple(gates(emit, x, y)), axis=1))
        return [emit(op.reshape(joined, [9 * 12, 32]))]

    torch.manual_seed(0)
    made = function([((9, 4, 32), "float32")] * 2, body)
    tensors = [torch.randn(9, 4, 32) for _ in range(2)]
    placed = compiled(made, 8)
    assert len(steps(placed)) == 1
    assert torch.equal(placed(tensors)[0], compiled(made, 0)(tensors)[0])


class Cells(nn.Module):
    """A loop by hand, of torch's cells."""

    def __init__(self, cell: type[nn.RNNCellBase]):
        super().__init__()
        self.cell = cell(16, 16)

    def forward(self, x):
        state, outputs = None, []
        for part in x:
            state = self.cell(part, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


def test_a_step_is_started_in_threads_where_a_launch_elsewhere_is_not():
    """The gates' gradients of an LSTM, 16 x 256: nine microseconds, between two products in threads."""
    backend = host_backend()
    made = function([((16, 256), "float32")] * 2 + [((768, 32), "float32")], by_a_product)
    parallel = []
    for each in (backend, backend.of_steps):
        program = compile_function(made, name="step", options=replace(current_options(), backend=each))
        (kernel,) = [step for step in program.steps if isinstance(step, Launch) and "concat" in step.ops]
        parallel.append("T.parallel" in program.source(kernel.name))
    assert parallel == [False, True]


#: One step of each is no loop, and more are one.
@pytest.mark.parametrize(
    ("steps", "cell"),
    sampled(
        itertools.product([1, 2, 7], [nn.LSTMCell, nn.GRUCell]), [(1, nn.LSTMCell), (7, nn.LSTMCell), (2, nn.GRUCell)]
    ),
)
def test_gradients_of_gates(cell, steps):
    torch.manual_seed(0)
    module, x = Cells(cell).double(), torch.randn(steps, 8, 16, dtype=torch.float64, requires_grad=True)

    def gradients():
        module(x).square().sum().backward()
        found = [each.grad for each in (x, *module.parameters())]
        module.zero_grad()
        x.grad = None
        return found

    eager = gradients()
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(gradients(), eager, rtol=1e-10, atol=1e-10)
    program = stats(module).entries[0].programs.backward.program
    ops = [step.ops for step in inner_steps(program.steps) if isinstance(step, Launch)]
    assert ("concat",) not in ops
    assert any("concat" in each for each in ops)
