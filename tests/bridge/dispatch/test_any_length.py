"""Loops by hand of any length: compiled at the second one, proven by recording each further one; eager's numbers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, explain, stats
from bridge.dispatch import automatic_dynamic, compile_entry
from tests.bridge.capture.looped_networks import FORMS, MODULES
from tests.bridge.compare import Call, assert_same, run
from tests.sampling import sampled

pytestmark = [
    pytest.mark.cpu("on a GPU each length has loops of its own"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="sizes that vary are fixed by older versions"),
]


@pytest.fixture(autouse=True)
def _few_operators(monkeypatch):
    """Short loops are also recorded."""
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)


def call_of(steps: int) -> Call:
    made = torch.Generator().manual_seed(steps)
    return Call((torch.randn(2, steps, 3, dtype=torch.float64, generator=made).requires_grad_(),))


def compared(module: nn.Module, lengths: list[int]) -> tuple[nn.Module, list[list[int]]]:
    """A module after calls of these lengths, which equal eager's; the proven lengths of each entry of any length."""
    eager = module.double()
    ours = add_tvm_dispatch(copy.deepcopy(eager), on_miss="compile")
    for seed, steps in enumerate(lengths):
        assert_same(run(ours, call_of(steps), seed=seed), run(eager, call_of(steps), seed=seed))
    assert stats(ours).hits == len(lengths) and not stats(ours).misses
    known = [entry.lowered.captured.loop.any_length for entry in stats(ours).entries]
    return ours, [sorted(each.proven) for each in known if each is not None]


@pytest.mark.composes(
    "a loop by hand over the steps of batches of varying length",
    "one entry for all lengths from the second one on, each proven by one recording (on a GPU an entry each)",
    section='`on_miss="compile"`',
)
@pytest.mark.parametrize(
    ("name", "lengths"),
    sampled(
        [
            ("layer norm lstm, last part first", [9, 14, 64, 8]),  # short after long, long after short
            ("state space", [25, 8, 11]),
            ("stacked", [9, 14, 11]),
            ("both ways", [14, 9, 25]),
        ],
        lambda case: case[0] in ("layer norm lstm, last part first", "both ways"),
    ),
)
def test_one_entry_serves_all_further_lengths(name, lengths):
    ours, proven = compared({**MODULES, **FORMS}[name](), [*lengths, *lengths])
    assert proven == [sorted(lengths[1:])] and len(stats(ours).entries) == 2


def test_a_further_length_is_recorded_and_nothing_else(monkeypatch):
    eager = MODULES["lstm"]().double()
    ours, compiled, recorded = add_tvm_dispatch(copy.deepcopy(eager), on_miss="compile"), [], []
    compile_one, record = compile_entry._compile_entry, automatic_dynamic.recorded_call
    monkeypatch.setattr(compile_entry, "_compile_entry", lambda *given: compiled.append(1) or compile_one(*given))
    monkeypatch.setattr(automatic_dynamic, "recorded_call", lambda *given: recorded.append(1) or record(*given))
    for steps in (9, 14, 11, 25, 11):
        assert_same(run(ours, call_of(steps)), run(eager, call_of(steps)))
    assert (len(compiled), len(recorded)) == (2, 3)


def test_lengths_that_are_added_by_hand_share_an_entry():
    eager = MODULES["lstm"]().double()
    ours = copy.deepcopy(eager)
    for steps in (9, 14, 11):
        add_tvm_dispatch(ours, call_of(steps).args, on_miss="error")
    assert len(stats(ours).entries) == 2
    for steps in (14, 11, 9):
        assert_same(run(ours, call_of(steps)), run(eager, call_of(steps)))


class Cell(nn.Module):
    """A loop whose ``step(self, x, state, t)`` is given."""

    def __init__(self, step):
        super().__init__()
        self.linear, self.step = nn.Linear(3, 3), step

    def forward(self, x):
        state, states = x[:, 0], []
        for t in range(x.shape[1]):
            state = self.step(self, x, state, t)
            states.append(state)
        return torch.stack(states, 1), state


def plain(self, x, state, t):
    return torch.tanh(self.linear(state) + x[:, t])


STEPS = {
    "by the length": lambda self, x, state, t: plain(self, x, state, t) / x.shape[1],
    "by its inverse": lambda self, x, state, t: plain(self, x, state, t) * (1.0 / x.shape[1]),
    "the last step": lambda self, x, state, t: plain(self, x, state, t) * (2 if t == x.shape[1] - 1 else 1),
    "each seventh step": lambda self, x, state, t: plain(self, x, state, t) if t % 7 else state.detach() + x[:, t],
    "long ones": lambda self, x, state, t: plain(self, x, state, t) * (3 if x.shape[1] > 12 else 1),
    "odd ones": lambda self, x, state, t: plain(self, x, state, t) * (3 if x.shape[1] % 2 else 1),
    "from the end": lambda self, x, state, t: plain(self, x, state, x.shape[1] - 1 - t) + x[:, -1],
    "the middle": lambda self, x, state, t: plain(self, x, state, t) + x[:, x.shape[1] // 2],
    "at most ten": lambda self, x, state, t: plain(self, x, state, min(t, 9)),
    "squares": lambda self, x, state, t: plain(self, x, state, t) * x.shape[1] ** 2,
}


@pytest.mark.parametrize("name", sampled(STEPS, ("by the length", "the last step", "odd ones")))
def test_what_depends_on_the_length_is_eagers(name):
    """Lengths with other operators have entries of their own, or share one with lengths of the same operators."""
    compared(Cell(STEPS[name]), [9, 14, 20, 13])


@pytest.mark.parametrize("name", ["another batch", "all of the steps in each"])
def test_steps_that_depend_on_the_size_are_of_one_size(name, caplog):
    def attends(self, x, state, t):
        return plain(self, x, state, t) + (x * state.unsqueeze(1)).sum(1)

    eager = Cell(plain if name == "another batch" else attends).double()
    ours = add_tvm_dispatch(copy.deepcopy(eager), on_miss="compile")
    with caplog.at_level(logging.WARNING, "bridge"):
        for size in (9, 11):
            x = torch.randn((size, 9, 3) if name == "another batch" else (2, size, 3), dtype=torch.float64)
            torch.testing.assert_close(ours(x), eager(x), rtol=1e-10, atol=1e-12)
    assert len(stats(ours).entries) == 2 and not any("of its own" in each.getMessage() for each in caplog.records)
    assert all(entry.lowered.captured.loop.any_length is None for entry in stats(ours).entries)


def test_other_state_of_the_module_is_another_entry():
    """A record for one state proves nothing for another."""

    def step(self, x, state, t):
        return plain(self, x, state, t) * (1 if self.training or x.shape[1] < 12 else 2)

    eager = Cell(step).double()
    ours = add_tvm_dispatch(copy.deepcopy(eager), on_miss="compile")
    for steps, training in ((9, True), (10, True), (14, True), (14, False), (10, False), (15, False), (15, True)):
        eager.train(training), ours.train(training)
        assert_same(run(ours, call_of(steps)), run(eager, call_of(steps)))
    assert not stats(ours).misses


def test_second_derivatives_of_a_further_length():
    eager = Cell(plain).double()
    ours = add_tvm_dispatch(copy.deepcopy(eager), on_miss="compile")

    def twice(module, steps):
        (x,) = call_of(steps).args
        (first,) = torch.autograd.grad(module(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *module.parameters()])

    for steps in (9, 14, 11):
        for made, wanted in zip(twice(ours, steps), twice(eager, steps), strict=True):
            torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-12)


def test_reports_tell_the_length():
    ours, _ = compared(Cell(plain), [9, 14])
    assert "x_1 - 1 times" in str(explain(ours).full)


def test_a_length_that_is_not_proven_is_named():
    eager = Cell(plain).double()
    ours = add_tvm_dispatch(copy.deepcopy(eager), on_miss="compile")
    for steps in (9, 14):
        call_of(steps)(ours)
    entry = stats(ours).entries[-1]
    failure = entry.guard.sizes.failure(call_of(20).args)
    assert failure is not None and "dimension 1 is 20" in failure.reason
    assert entry.guard.check(ours, call_of(20).args, {}) is None


def test_results_that_share_memory():
    class Shares(nn.Module):
        def forward(self, x):
            state, states = x[:, 0], []
            for t in range(x.shape[1]):
                state = (state + x[:, t]).sin()
                states.append(state)
            return x[:, -1], torch.stack(states, 1), state, state, x.shape[1]

    compared(Shares(), [9, 14, 11])
