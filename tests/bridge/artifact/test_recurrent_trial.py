"""``nn.LSTM`` in float32 on the processor: oneDNN's kernel or a loop, chosen by a trial of both."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile.cpu import build
from bridge.lowering import pipeline
from tests.bridge.compare import Call, assert_same, run
from tests.sampling import sampled

pytestmark = pytest.mark.cpu("oneDNN's kernel is the host's")

ROWS, SIZE = 8, 128
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def nothing_known(used_cache):
    as_another_process()
    yield
    as_another_process()


def as_another_process():
    SESSION.reset("choices", "lowerings", "programs")


@pytest.fixture
def measured(tried, monkeypatch):
    """As :func:`tried`, without compiling the forms, which most tests do not run."""
    monkeypatch.setattr(pipeline, "_runs", lambda *_: dict.fromkeys((pipeline._KERNEL, pipeline._LOOP)))
    return tried


@pytest.fixture
def tried(monkeypatch):
    """The forms of each trial; the seconds of the loop, which the test may set, beside 1.0 of the kernel."""

    class Trials(list):
        loop = 0.5

    found = Trials()

    def seconds_of(functions):
        found.append(functions)
        return {name: 1.0 if "oneDNN" in name else found.loop for name in functions}

    monkeypatch.setattr(pipeline, "seconds_of", seconds_of)
    return found


def lstm(**options):
    torch.manual_seed(0)
    return nn.LSTM(16, SIZE, **options)


def sample(steps=5, rows=ROWS, grad=True):
    return torch.randn(steps, rows, 16, requires_grad=grad)


def forms(module, x):
    """Whether the dispatched module is a loop, and whether it calls the kernel."""
    add_tvm_dispatch(module, x)
    (entry,) = stats(module).entries
    steps = [step for part in (entry.forward, entry.backward) if part is not None for step in part.steps]
    return entry.has_loops, any(step.name.startswith("recurrent_layer") for step in steps)


LOOP, KERNEL = (True, False), (False, True)


@pytest.mark.parametrize(
    ("grad", "loop", "wanted"),
    sampled(
        [(grad, *each) for grad in (True, False) for each in ((0.9, LOOP), (1.0, KERNEL), (1.5, KERNEL))],
        [(True, 0.9, LOOP), (True, 1.0, KERNEL), (False, 0.9, LOOP)],
    ),
)
def test_the_quicker_form_is_taken(measured, loop, wanted, grad):
    measured.loop = loop
    with torch.set_grad_enabled(grad):
        assert forms(lstm(), sample(grad=grad)) == wanted
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("steps", "loop"), sampled(itertools.product((1, 2, 7, 64), (0.5, 2.0)), [(1, 0.5), (7, 0.5), (7, 2.0)])
)
def test_either_form_has_eagers_numbers(measured, loop, steps):
    measured.loop = loop
    module = lstm(num_layers=2, bidirectional=True)
    eager, call = copy.deepcopy(module), Call((sample(steps),))
    assert forms(module, call.args[0]) == (LOOP if loop < 1 else KERNEL)
    assert_same(run(module, call), run(eager, call), **ROUNDING)
    assert len(measured) == 2, "both directions are of one shape, the second layer has more inputs"


def test_layers_of_one_call_are_chosen_one_by_one(monkeypatch, measured):
    """The second layer has other inputs, and another trial."""
    loop = {16: 2.0, SIZE: 0.5}

    def times(_, __, layer):
        return {pipeline._KERNEL: 1.0, pipeline._LOOP: loop[layer.inputs]}

    monkeypatch.setattr(pipeline, "_seconds", times)
    module = lstm(num_layers=2)
    eager, call = copy.deepcopy(module), Call((sample(),))
    assert forms(module, call.args[0]) == (True, True)
    assert_same(run(module, call), run(eager, call), **ROUNDING)


def test_both_forms_run_and_nobody_notices(monkeypatch):
    found, seconds_of = [], pipeline.seconds_of

    def noted(functions):
        assert not torch.is_grad_enabled()
        found.append(seconds_of(functions))
        return found[-1]

    monkeypatch.setattr(pipeline, "seconds_of", noted)
    module, x = lstm(), sample()
    state = torch.get_rng_state()
    with torch.autocast("cpu", enabled=False):
        forms(module, x)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    assert x.grad is None and all(each.grad is None for each in module.parameters())
    ((kernel, loop),) = [tuple(each.values()) for each in found]
    assert kernel > 0 and loop > 0


def test_the_forms_of_a_trial_do_the_same(tried):
    """Both candidates of a trial compute the layer's outputs and all its gradients."""
    forms(lstm(), sample())
    (functions,) = tried
    kernel, loop = ([each.clone() for each in step()] for step in functions.values())
    assert len(kernel) == len(loop) == 5
    for one, other in zip(kernel, loop, strict=True):
        torch.testing.assert_close(one, other, **ROUNDING)


def test_inputs_without_a_gradient_have_a_trial_of_their_own(tried):
    """The loop saves one of three products there."""
    forms(lstm(num_layers=2), sample(grad=False))
    first, second = tried
    counts = [[len(step()) for step in functions.values()] for functions in (first, second)]
    assert counts == [[4, 4], [5, 5]], "the second layer's inputs have one"
    embedded = nn.Sequential(nn.Linear(16, 16), lstm())
    forms(embedded, sample(grad=False))
    assert len(tried) == 3 and [len(step()) for step in tried[2].values()] == [5, 5]
    with torch.no_grad():
        forms(lstm(), sample(grad=True))
        forms(lstm(), sample(grad=False))
    assert len(tried) == 4


def test_a_trial_is_made_once_per_machine_and_threads(measured, monkeypatch):
    forms(lstm(), sample())
    SESSION.reset("lowerings")
    forms(lstm(), sample())
    assert len(measured) == 1, "in this process"
    as_another_process()
    assert forms(lstm(bias=True), sample(steps=5)) == LOOP and len(measured) == 1, "on the disk"
    forms(lstm(bias=False), sample())
    assert len(measured) == 2
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        forms(lstm(), sample())
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 3
    as_another_process()
    monkeypatch.setattr(build, "model", lambda: "another processor")
    measured.loop = 2.0
    assert forms(lstm(), sample()) == KERNEL and len(measured) == 4


def test_what_was_lowered_for_other_threads_is_not_taken(measured):
    """In this process and from the disk: the other candidate may be quicker there."""
    assert forms(lstm(), sample()) == LOOP
    threads, measured.loop = torch.get_num_threads(), 2.0
    try:
        torch.set_num_threads(threads + 1)
        assert forms(lstm(), sample()) == KERNEL
        as_another_process()
        assert forms(lstm(), sample()) == KERNEL
    finally:
        torch.set_num_threads(threads)
    assert forms(lstm(), sample()) == LOOP


def test_nothing_is_measured_where_little_is_to_be_gained(measured):
    assert forms(nn.LSTM(16, 32), sample()) == KERNEL
    assert not measured


def test_nothing_is_measured_where_all_is_to_be_deterministic(measured):
    torch.use_deterministic_algorithms(True)
    try:
        assert forms(lstm(), sample()) == KERNEL
    finally:
        torch.use_deterministic_algorithms(False)
    assert not measured
    assert forms(lstm(), sample()) == LOOP, "what was lowered then is not taken"


def test_what_cannot_be_tried_is_oneDNNs(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(pipeline, "_runs", fails)
    with caplog.at_level("INFO", "bridge.compile"):
        assert forms(lstm(), sample()) == KERNEL
    assert "no trial, oneDNN's kernel is taken: no memory" in caplog.text
