"""The steps of a call: frozen data in eager's order, and all that a call does."""

import sys
from collections import Counter
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from torch import nn

import bridge
from bridge import add_tvm_dispatch, explain, stats
from bridge.dispatch.call_run import CallRun

pytestmark = pytest.mark.usefixtures("lowered_once")

KINDS = [
    *("inputs", "numbers", "draws", "forward", "layout", "generator"),
    *("save", "write back", "results", "attributes", "backward"),
]


@pytest.fixture(autouse=True)
def nothing_is_laid_out_by_programs(monkeypatch):
    """No result layouts by programs, as on a GPU and where sizes vary: else the step "layout" does not exist."""
    monkeypatch.setattr("bridge.dispatch.results.memory_orders", lambda *_: ())


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(4), nn.Linear(4, 4), 0

    def forward(self, x, scale):
        self.calls += 1
        y = self.linear(nn.functional.dropout(self.norm(x), 0.3))
        y = y * scale if scale > 0 else y - scale
        return y.t().contiguous().t(), x.view(-1), torch.bernoulli(x.detach().sigmoid())


def made():
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)  # in float32, sums that cancel differ by rounding
    return Everything().double(), (x, torch.tensor(2))


def left_behind(module, args):
    """Results of a training step of the module, and all state that it leaves."""
    torch.manual_seed(1)
    y, view, drawn = module(*args)
    args[0].grad = None
    module.zero_grad()
    y.sum().backward()
    grads = [args[0].grad, *(parameter.grad for parameter in module.parameters())]
    state = [*module.buffers(), torch.get_rng_state()]
    return [y, torch.tensor(y.stride()), view, drawn, *grads, *(t.clone() for t in state), torch.tensor(module.calls)]


def same(some, others):
    return all(torch.allclose(one.double(), other.double()) for one, other in zip(some, others, strict=True))


@pytest.mark.cpu("steps of the host: a GPU's draws move the generator before the program")
def test_a_call_runs_its_steps_in_order():
    (eager, args), (module, _) = made(), made()
    add_tvm_dispatch(module, args)
    (entry,) = stats(module).entries
    assert [step.kind for step in entry.steps] == KINDS
    assert same(left_behind(module, args), left_behind(eager, args))
    assert stats(module).hits == entry.hits == 1


@pytest.mark.cpu("steps of the host: a GPU's draws move the generator before the program")
@pytest.mark.parametrize("kind", ["layout", "generator", "write back", "attributes"])
def test_a_call_runs_nothing_else(kind):
    """Without a step, its effect is missing."""
    (eager, args), (module, _) = made(), made()
    add_tvm_dispatch(module, args)
    (entry,) = stats(module).entries
    steps = [s for s in entry.steps if s.kind != kind]
    entry.run = CallRun(steps, entry.programs, entry.guard, entry.lowered.captured)
    assert not same(left_behind(module, args), left_behind(eager, args))
    assert stats(module).hits == 1


def test_without_its_numbers_a_call_takes_the_sample_s_branch():
    (eager, (x, scale)), (module, _) = made(), made()
    add_tvm_dispatch(module, (x, scale))
    (entry,) = stats(module).entries
    assert same(left_behind(module, (x, -scale)), left_behind(eager, (x, -scale))) and not stats(module).hits
    steps = [step for step in entry.steps if step.kind != "numbers"]
    entry.run = CallRun(steps, entry.programs, entry.guard, entry.lowered.captured)
    assert not same(left_behind(module, (x, -scale)), left_behind(eager, (x, -scale))) and stats(module).hits


def test_steps_are_plain_data():
    (one, args), (other, _) = made(), made()
    steps = [stats(add_tvm_dispatch(module, args)).entries[0].steps for module in (one, other)]
    assert steps[0] == steps[1] and hash(steps[0]) == hash(steps[1])
    with pytest.raises(FrozenInstanceError):
        steps[0][0].names = ()
    plain = stats(add_tvm_dispatch(nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4))).entries[0].steps
    assert [step.kind for step in plain] == ["inputs", "forward", "results"]


@pytest.mark.cpu("steps of the host: a GPU's draws move the generator before the program")
def test_explain_prints_them():
    module, args = made()
    report = explain(add_tvm_dispatch(module, args))
    lines = {line.split()[1]: line for line in str(report.full).splitlines() if line.startswith("  call ")}
    assert [line[12:24].strip() for line in lines.values()] == KINDS
    for kind, words in {
        "inputs": "norm.weight, norm.bias, linear.weight, linear.bias, norm.running_mean, norm.running_var",
        "draws": "mask_0 = bernoulli_(0.7) of 6x4, draw_1 = the generator's state, for bernoulli of 6x4 in the program",
        "forward": "new norm.running_mean, new norm.running_var, new norm.num_batches_tracked",
        "numbers": "if scale > 0",
        "layout": "output 0 strided (1, 6)",
        "save": "mask_0",
        "write": "norm.running_mean, norm.running_var, norm.num_batches_tracked",
        "results": "output 0, view (24,) of x, output 1",
        "attributes": "calls += 1",
        "backward": "gradients of norm.weight, norm.bias, linear.weight, linear.bias, x",
    }.items():
        assert words in lines[kind]


def test_entries_that_are_gone_stay_counted():
    module = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    counted = stats(add_tvm_dispatch(module, x))
    module(x)
    add_tvm_dispatch(module, x, partition="save_all")
    module(x)
    module(torch.ones(3, 4))
    assert counted is stats(module) and [entry.hits for entry in counted.entries] == [1]
    assert counted.hits == 2 and counted.misses.total() == 1


@pytest.mark.cpu("steps of the host: a GPU's draws move the generator before the program")
def test_a_call_costs_no_more_functions_than_it_did():
    """Python functions between torch and the programs in a tiny module's step; three are for a second derivative."""
    module, x = nn.Tanh(), torch.randn(4, 4, requires_grad=True)
    add_tvm_dispatch(module, x)
    for _ in range(3):
        module(x).sum().backward()
    home, counts = Path(bridge.__file__).parent, Counter()
    ours = tuple(str(home / room) for room in ("base", "capture", "dispatch", "state"))

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            counts[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        module(x).sum().backward()
    finally:
        sys.setprofile(None)
    assert counts.total() <= 40, counts
