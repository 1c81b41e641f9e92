"""Loops after one another, and steps that the results do not need: gradients are eager's, in float64."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from autodiff.gradients.registry import CHECKS
from autodiff.ir import bindings
from autodiff.scan import is_scan, scan_call, scan_of
from bridge import add_tvm_dispatch, lower, stats
from bridge.capture import LOOP_MARKS
from tests.sampling import sampled


@pytest.fixture(autouse=True)
def few_operators(monkeypatch):
    """Short loops are also recorded."""
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)


class Chained(nn.Module):
    """The second loop reads the first one's results, and nothing with parameters stands between them."""

    def __init__(self, falls=False, starts_at_part=False):
        super().__init__()
        self.falls, self.starts_at_part = falls, starts_at_part

    def forward(self, x):
        lower, upper = x.sum(0), x[1] if self.starts_at_part else torch.zeros_like(x[0])
        made, results = [], []
        for step in range(len(x)):
            lower = torch.sin(lower + x[step])
            made.append(lower)
        for part in torch.stack(made[::-1] if self.falls else made):
            upper = torch.tanh(upper + part)
            results.append(upper)
        return torch.stack(results), upper


class LastStateUnused(nn.Module):
    """No step reads the last step's value of ``other``."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x):
        state, other = x[0], x[1]
        for part in x:
            state, other = torch.tanh(state + other), (part * self.factor).tanh()
        return state


class OneStepRead(nn.Module):
    """The results need one step's value of ``seen``."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x):
        state, seen = x[0], []
        for part in x:
            state = torch.tanh(state + 0.5)
            seen.append((part * self.factor).tanh() + state)
        return state, seen[3]


class StateUnused(nn.Module):
    """No result depends on ``other``, which reads the state and is carried along."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x):
        state, other, others = x[0], x[1], []
        for step, part in enumerate(x):
            state, other = torch.tanh(state - x[step].mean()), torch.sin(other * self.factor + state * part * step)
            others.append(other)
        torch.stack(others)
        return state


class LaterStepsStopped(nn.Module):
    """The results read the last four steps behind a stop of gradients alone."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x):
        state, states = x[0], []
        for part in x:
            state = torch.sin(state * self.factor + part)
            states.append(state)
        return states[4] + torch.stack(states).detach().nan_to_num()


class StateStopped(nn.Module):
    """The results read ``other`` behind a stop of gradients alone."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x):
        state, other, states = x[0], x[1].detach(), []
        for part in x:
            state = other.detach() * torch.sigmoid(state * self.factor)
            other = torch.sin(other * self.factor + part)
            states.append(state)
        return torch.stack(states)


class StateCompared(StateStopped):
    """The results depend on ``other`` by a comparison alone."""

    def forward(self, x):
        state, other, states = x[0], x[1].detach(), []
        for part in x:
            state = torch.where(other < 0.1, torch.tanh(state * self.factor), part * 0.5)
            other = torch.sin(other * self.factor + part)
            states.append(state)
        return torch.stack(states)


def gradients(module, x):
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(results, [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in results])
    return [*results, x.grad, *(parameter.grad for parameter in module.parameters())]


def compare(module, x, samples=()):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x.clone().requires_grad_())
    for each in (x, *samples):
        for parameter in (*module.parameters(), *eager.parameters()):
            parameter.grad = None
        ours, theirs = (gradients(one, each.clone().requires_grad_()) for one in (module, eager))
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert stats(module).hits == 1 + len(samples)
    return stats(module).entries[0].lowered


def marks_of(lowered):
    return [node for node in lowered.captured.graph.nodes if node.target in LOOP_MARKS]


@pytest.mark.parametrize(
    ("starts_at_part", "falls"),
    sampled(itertools.product((False, True), (False, True)), [(False, False), (True, True)]),
)
def test_gradients_flow_from_loop_to_loop(starts_at_part, falls):
    torch.manual_seed(0)
    assert marks_of(compare(Chained(falls, starts_at_part), torch.randn(8, 2, 4, dtype=torch.float64)))


@pytest.mark.parametrize("kind", [LastStateUnused, OneStepRead, StateUnused, LaterStepsStopped])
def test_steps_that_nobody_reads_have_no_gradient(kind):
    """An infinite number that only an unread step reads is multiplied by no gradient, not by zero."""
    torch.manual_seed(0)
    x = torch.randn(9, 2, 4, dtype=torch.float64)
    infinite = x.clone()
    infinite[8] = float("inf")
    lowered = compare(kind(), x, [infinite])
    assert marks_of(lowered)


@pytest.mark.parametrize("kind", [StateStopped, StateCompared])
def test_a_state_that_is_read_without_a_gradient_has_none(kind):
    """It is zero in all steps, also where a derivative is infinite."""
    torch.manual_seed(0)
    x = torch.randn(9, 2, 4, dtype=torch.float64)
    infinite = x.clone()
    infinite[4, 0, 0] = float("inf")
    assert marks_of(compare(kind(), x, [infinite]))


def test_a_gradient_that_a_scan_lacks_is_a_reason():
    """A value requires grad for which the scan has no gradient."""
    lowered = lower(Chained(starts_at_part=True), torch.randn(8, 2, 4, requires_grad=True))
    calls = [value for _, value in bindings(lowered.forward) if is_scan(value)]
    assert len(calls) == 2
    check = CHECKS["library.scan"]
    for call in calls:
        scan, tensors = scan_of(call)
        *fewer, last = wanted = scan.gradient["wanted"]
        assert check(call, [tensors[place] for place in wanted]) is None
        lacking = scan_call(replace(scan, gradient={**scan.gradient, "wanted": fewer}), tensors)
        assert f"[{last}]" in check(lacking, [tensors[place] for place in wanted])
        assert check(lacking, [tensors[place] for place in fewer]) is None
