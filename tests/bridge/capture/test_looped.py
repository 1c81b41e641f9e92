"""Loops that are found while forward runs: one step is traced, and numbers, gradients and draws are eager's."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from autodiff.ir import bindings
from autodiff.scan import is_scan, scan_of
from bridge import add_tvm_dispatch, lower, stats
from bridge.capture import LOOP_MARKS, loops_tell, steady_call
from bridge.lowering import reuse
from bridge.state import SampleCall
from partition import scans
from tests.bridge.capture.looped_networks import (
    DROPS,
    FORMS,
    LATER,
    MODULES,
    ON_THE_HOST,
    Lstm,
    Numbers,
    OneOfTwo,
    marks_of,
)
from tests.bridge.compare import check_module
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("few_operators")

LAST_PART_FIRST = "layer norm lstm, last part first"


@pytest.mark.parametrize(
    ("name", "steps"),
    sampled(
        [*((name, 9) for name in MODULES), ("gru, two layers", 1), ("halves", 2), (LAST_PART_FIRST, 64)],
        lambda case: case[1] != 9 or case[0] in ("halves", "state space"),
    ),
)
def test_numbers_and_gradients_are_eagers(name, steps):
    module = check_module(MODULES[name], lambda: torch.randn(2, steps, 3, requires_grad=True), calls=1)
    assert bool(marks_of(stats(module).entries[0].lowered)) == (steps > 2)


def test_loops_are_told_before_the_run_on_fake_tensors(monkeypatch):
    """So that their kernels are built meanwhile."""
    heard = []
    run = steady_call.fake_run_of
    monkeypatch.setattr(
        steady_call, "fake_run_of", lambda *given, **named: heard.append("fake") or run(*given, **named)
    )
    x = torch.randn(2, 9, 3)
    with loops_tell(lambda: heard.append("loops")):
        lower(MODULES["lstm"](), x)
        assert heard == ["loops", "fake"]
        lower(torch.nn.Linear(3, 3), x)
    assert heard.count("loops") == 1


ALIKE = ("stacked", "stacked, layer by layer", "buffers, last part first", "buffers, copied into")


@pytest.mark.parametrize("name", sampled([*FORMS, *LATER], lambda name: name not in ALIKE))
def test_loops_of_other_forms_are_eagers(name):
    module = check_module({**FORMS, **LATER}[name], lambda: torch.randn(2, 8, 3, requires_grad=True), calls=1)
    assert name in LATER or marks_of(stats(module).entries[0].lowered)


@pytest.mark.parametrize(
    ("name", "width"),
    sampled(itertools.product(DROPS, (2, 70)), [("dropout", 2), ("dropout, last part first", 70)]),
)
def test_masks_of_all_steps_are_eagers(name, width):
    """Torch draws masks of few elements, compiled code the others."""
    module = check_module(DROPS[name], lambda: torch.randn(width, 8, 3, requires_grad=True))
    draws = stats(module).entries[0].lowered.captured.draws
    assert len(draws) == 4


@ON_THE_HOST
def test_a_loop_that_the_results_do_not_need_draws():
    module = check_module(OneOfTwo, lambda: torch.randn(2, 8, 3, requires_grad=True), calls=1)
    captured = stats(module).entries[0].lowered.captured
    assert len(captured.draws) == 3 and sum(node.target is LOOP_MARKS[0] for node in captured.graph.nodes) == 1


SOME_FORMS = ["buffers", "numbers", "stacked"]


@pytest.mark.parametrize(
    "name",
    sampled([*MODULES, *SOME_FORMS, pytest.param("dropout", marks=ON_THE_HOST)], ["lstm", "buffers"]),
)
def test_one_step_is_traced_whatever_the_length(name):
    module, sizes, bodies = {**MODULES, **FORMS, **DROPS}[name](), [], []
    for steps in (9, 14):
        lowered = lower(module, torch.randn(2, steps, 3))
        assert {node.target for node in lowered["captured"].ir.nodes} >= set(LOOP_MARKS[2:3])
        sizes.append([stage.size for stage in lowered.stages[:8]])  # the partition weighs bytes of all steps
        scans = [scan_of(value)[0] for _, value in bindings(lowered.forward) if is_scan(value)]
        assert {scan.length for scan in scans} <= {steps, steps - 1, steps - 2} and scans
        bodies.append([scan.body for scan in scans])
    assert sizes[0] == sizes[1] and len(bodies[0]) == len(bodies[1])


def test_another_length_is_made_of_what_is_known():
    """Another length differentiates and compiles no step."""
    module, entries, differentiated = Lstm(), [], []
    add_tvm_dispatch(module, on_miss="compile")
    for steps in (9, 14):
        module(torch.randn(2, steps, 3, requires_grad=True))[0].sum().backward()
        entries.append(stats(module).entries[-1])
        differentiated.append(scans._step_of_any_length.cache_info().misses)
    first, other = ([*entry.forward.bodies, *entry.backward.bodies] for entry in entries)
    assert len(first) == 2 and all(a is b for a, b in zip(first, other, strict=True))
    assert differentiated[0] == differentiated[1]


def test_equal_modules_share_what_was_lowered():
    def lowered(module, steps=11):
        return reuse.lower_once(SampleCall(module, (torch.randn(2, steps, 3),), {}), "min_cut")

    first, again, other = lowered(Numbers()), lowered(Numbers()), Numbers()
    assert again is first and marks_of(first)
    other.rates[2] = 0.7
    assert lowered(other) is not first
    assert lowered(Numbers(), 15) is not first


class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTMCell(3, 4)

    def forward(self, x):
        state, found = (x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state[0])
        return torch.stack(found, 1)


@pytest.mark.cpu("half layers are whole on a GPU")
@pytest.mark.parametrize("make", [Cell, lambda: torch.nn.GRU(3, 4, batch_first=True).bfloat16()], ids=["cell", "gru"])
def test_casts_and_half_layers_are_steps(make):
    """Autocast casts a weight at the first step that reads it alone; layers of half types are recorded step by step."""
    torch.manual_seed(0)
    eager, x = make(), torch.randn(2, 12, 3)
    x = x.to(torch.bfloat16) if isinstance(eager, torch.nn.GRU) else x
    module = copy.deepcopy(eager)
    with torch.autocast("cpu", torch.bfloat16, enabled=isinstance(eager, Cell)):
        add_tvm_dispatch(module, x)
        results = [each(x) for each in (eager, module)]
    assert stats(module).hits == 1 and marks_of(stats(module).entries[0].lowered)
    expected, actual = (each[0] if isinstance(each, tuple) else each for each in results)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_loops_of_few_operators_are_of_one_length(monkeypatch):
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 100)
    short, long = (lower(Lstm(), torch.randn(2, steps, 3)) for steps in (6, 12))
    assert marks_of(short) and marks_of(long)
    assert [each.captured.loop.is_recorded for each in (short, long)] == [False, True]
    assert short.captured.loop.recording is None


def test_every_stage_is_checked():
    lowered = lower(Lstm(norm=True).double(), torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True))
    checked = lowered.check()
    assert checked.ok, str(checked)


def test_python_state_that_forward_sets_is_left_alone():
    module = Lstm()
    module.calls = 0
    module.register_forward_pre_hook(lambda module, args: None)
    add_tvm_dispatch(module, torch.randn(2, 12, 3))
    assert module.calls == 0 and stats(module).entries
