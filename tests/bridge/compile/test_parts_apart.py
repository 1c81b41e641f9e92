"""Loops read the states before their steps in place: no concatenation, the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from tvm.relax import Tuple, op

from autodiff.ir import TensorType, TupleGetItem, Var, build_function
from autodiff.scan import Scan, body_text, scan_call
from bridge import add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile import CallLibrary, compile_function, host_backend
from bridge.compile.passes import sections
from bridge.compile.runtime.loop_frame import RunLoop
from tests.bridge.compile_helpers import current_options, function
from tests.sampling import sampled

STEPS = 6


class Cells(nn.Module):
    """An LSTM by hand on computed states; ``falls``: from the last part to the first."""

    def __init__(self, falls: bool = False):
        super().__init__()
        self.of_x, self.of_h, self.falls = nn.Linear(5, 12), nn.Linear(3, 12, bias=False), falls

    def forward(self, x, h, c):
        h, c, hs = h.tanh(), c.tanh(), []
        for part in reversed(x) if self.falls else x:
            i, f, g, o = (self.of_x(part) + self.of_h(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            hs.append(h)
        return torch.stack(hs, 1), c


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(5, 3, batch_first=True, bidirectional=True, num_layers=2)

    def forward(self, x, h, c):
        states = (each.expand(4, *each.shape) * torch.arange(1, 5).view(4, 1, 1) for each in (h, c))
        y, (_, c) = self.layer(x.transpose(0, 1), tuple(each.contiguous() for each in states))
        return y, c


@pytest.fixture
def fresh():
    def clear():
        SESSION.reset("programs", "lowerings")

    clear()
    yield clear
    clear()


def leaves(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(steps)
    return [torch.randn(extents, dtype=torch.float64) for extents in [(steps, 3, 5), (3, 3), (3, 3)]]


def stepped(module: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results and gradients of one step."""
    given = [each.clone().requires_grad_() for each in given]
    module.zero_grad()
    results = module(*given)
    sum((each.sin() * (place + 1)).sum() for place, each in enumerate(results)).backward()
    return [*results, *(each.grad for each in given), *(each.grad.clone() for each in module.parameters())]


MODULES = {"cells": Cells, "falling": lambda: Cells(falls=True), "layers": Layer}
ALWAYS = [("cells", 1), ("cells", 2), ("falling", 7), ("layers", 2)]


@pytest.mark.parametrize(("name", "steps"), sampled(itertools.product(MODULES, [1, 2, 7]), ALWAYS))
def test_gradients(fresh, name, steps):
    torch.manual_seed(0)
    module, given = MODULES[name]().double(), leaves(steps)
    wanted = stepped(module, given)
    add_tvm_dispatch(module, tuple(each.clone().requires_grad_() for each in given))
    for _ in range(2):
        torch.testing.assert_close(stepped(module, given), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("falls", sampled([False, True], [False]))
def test_the_bits_are_those_of_a_concatenation(fresh, falls, monkeypatch):
    torch.manual_seed(0)
    module, given, found = Cells(falls).double(), leaves(STEPS), []
    for is_apart in (True, False):
        if not is_apart:
            monkeypatch.setattr("bridge.compile.pipeline.read_parts_apart", lambda graph, _: graph)
        fresh()
        add_tvm_dispatch(module, tuple(each.clone().requires_grad_() for each in given))
        found.append(stepped(module, given))
        (entry,) = stats(module).entries
        loops = [step for step in entry.programs.backward.program.steps if isinstance(step, RunLoop)]
        assert [len(loop.apart) for loop in loops] == [1 if is_apart else 0]
        assert "cat" not in [step.name for step in entry.programs.backward.program.steps] or not is_apart
        remove_tvm_dispatch(module)
    assert all(map(torch.equal, *found))


def summed(reverse: bool, one_first: bool, read_again: bool = False, steps: int = STEPS):
    """``carry += x * x``, and ``carry`` as a y, over parts of a concatenation."""
    carry, part, square, total = (Var(name, TensorType((3,), "float64")) for name in ("c", "x", "square", "total"))
    inside = [(square, op.multiply(part, part)), (total, op.add(carry, square))]
    scan = Scan(body_text(build_function([carry, part], inside, [total, total])), 1, 1, steps, reverse)

    def body(emit, first, one, others):
        parts = [one, others] if one_first else [others, one]
        joined = emit(op.concat(Tuple(parts), 0))
        made = emit(scan_call(scan, [first, joined]))
        more = [emit(op.sum(joined, [0]))] if read_again else []
        return [emit(TupleGetItem(made, 0)), emit(TupleGetItem(made, 1)), *more]

    return function([((3,), "float64"), ((1, 3), "float64"), ((steps - 1, 3), "float64")], body)


@pytest.mark.parametrize("drives", [True, False])
@pytest.mark.parametrize("steps", sampled([2, 3, 4, 5, 8], [2, 5]))
@pytest.mark.parametrize("reverse", [True, False])
def test_the_step_that_is_run_last_reads_a_tensor_of_its_own(fresh, reverse, steps, drives, monkeypatch):
    if not drives:
        monkeypatch.setattr("bridge.compile.cpu.backend.step_driver", lambda: None)
    first, one, others = (torch.randn(extents, dtype=torch.float64) for extents in [(3,), (1, 3), (steps - 1, 3)])
    program = compile_function(summed(reverse, one_first=reverse, steps=steps), name="s", options=current_options())
    (loop,) = (step for step in program.steps if isinstance(step, RunLoop))
    assert loop.apart == (0,) and not any(isinstance(step, CallLibrary) for step in program.steps)
    wanted, total = [], first
    for part in (*(others.flip(0) if reverse else others), one[0]):
        wanted.append(total := total + part * part)
    last, ys = program([first, one, others])
    assert torch.equal(last, total)
    assert torch.equal(ys, torch.stack(wanted[::-1] if reverse else wanted))


def test_others_stay(fresh):
    """The part of the step that is run first; a value with other readers; a concatenation of more than two."""
    for made in (summed(True, False), summed(False, True), summed(True, True, read_again=True)):
        program = compile_function(made, name="s", options=current_options())
        (loop,) = (step for step in program.steps if isinstance(step, RunLoop))
        assert not loop.apart


def test_a_graph_without_loops_is_the_same():
    graph = object.__new__(sections.Graph)
    graph.nodes = []
    assert sections.read_parts_apart(graph, host_backend()) is graph
