"""Recorded graphs, with a recorder on the host: when programs are recorded, replayed, or launched kernel by kernel."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from tvm.relax import op as R

from bridge.compile.graphs import control as control_module
from bridge.compile.graphs import executor as module
from bridge.compile.graphs.control import RUNS, RecordedGraphs, Shared, Verdicts
from bridge.compile.graphs.executor import EntryGraphs, GraphedExecutor
from bridge.compile.graphs.recordings import MAX_ADDRESSES
from tests.bridge.compile.host_recorder import HostMemory, HostRecorder, memories
from tests.bridge.compile_helpers import program


def body(emit, x, w):
    """A result, a library function's result, a view of a result, an input, a constant's product."""
    y = emit(R.matmul(x, w))
    z = emit(R.nn.softmax(y))
    return [z, emit(R.cumsum(y, axis=1)), emit(R.reshape(z, (2, 48))), x]


def expected(x, w):
    y = x @ w
    z = torch.softmax(y, -1)
    return [z, torch.cumsum(y, 1), z.reshape(2, 48), x]


@pytest.fixture(scope="module")
def compiled():
    return program([((12, 16), "float32"), ((16, 8), "float32")], body)


class Graphed:
    """A graphed executor with everything that can be set."""

    def __init__(self, compiled, mode=True, seconds=(1.0, 1.0), verdicts=None):
        self.control, self.recorder = RecordedGraphs(mode), HostRecorder(compiled)
        self.recorder.seconds = seconds
        self.outputs, self.saved_tensors = HostMemory(), HostMemory()
        memory_of, shared = memories(self.outputs, self.saved_tensors, 1), Shared(verdicts=verdicts)
        self.run = GraphedExecutor(compiled, compiled.executor, self.recorder, self.control, memory_of, shared)
        self.w = torch.randn(16, 8)
        self.x = torch.randn(12, 16)

    def check(self, x=None, w=None):
        x, w = self.x if x is None else x, self.w if w is None else w
        made = self.run([x, w])
        for ours, theirs in zip(made, expected(x, w), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert made[3] is x
        return made

    def warm(self, calls=6):
        for _ in range(calls):
            self.check()
        assert len(self.run)
        return self


@pytest.fixture
def graphed(compiled):
    return Graphed(compiled)


def test_the_first_calls_run_by_themselves_then_one_recording_is_replayed(graphed):
    for _ in range(20):
        graphed.check()
    assert graphed.recorder.recorded == 1 and graphed.control.recordings == 1
    assert graphed.control.replays == graphed.recorder.replayed == 17
    assert graphed.control.ungraphed == {"warm-up": 2, "addresses that are new": 1}


def test_inputs_change_in_place_and_are_read_anew(graphed):
    graphed.warm()
    for _ in range(5):
        graphed.x.normal_(), graphed.w.normal_()
        graphed.check()
    assert graphed.recorder.recorded == 1


def test_memory_that_somebody_holds_is_not_written(graphed):
    """All results of twenty calls, whichever are held."""
    graphed.warm()
    held = []
    for call in range(20):
        graphed.x.normal_()
        made = graphed.check()
        held.append([(each, each.clone()) for each in made[: call % 3 + 1]])
        del made
        if call % 5 == 4:
            held.clear()
        assert all(torch.equal(now, then) for results in held for now, then in results)
    assert graphed.control.replays > 10


def test_results_have_memory_and_versions_of_their_own(graphed):
    made = graphed.warm().check()
    versions = [each._version for each in made]
    made[0].add_(1)
    assert [each._version for each in made[1:2]] == versions[1:2] and not made[0]._is_view()
    assert made[0].untyped_storage().data_ptr() != made[1].untyped_storage().data_ptr()


def test_strided_inputs_are_recorded_where_they_lie(graphed):
    """No copy is made outside, whose address would differ at each call."""
    graphed.w = torch.randn(8, 16).t()
    held = [torch.empty(16, 8) for _ in range(3)]
    for _ in range(20):
        graphed.w.normal_(), graphed.check()
        held.append(torch.empty(16, 8))
    assert graphed.recorder.recorded == 1 and graphed.control.replays == 17 and not graphed.run.held_bytes
    graphed.w = graphed.w.as_strided((16, 8), (8, 1))  # the same address
    graphed.warm()
    assert graphed.recorder.recorded == 2


def test_a_moved_parameter_is_recorded_again_and_comes_back(graphed):
    graphed.warm()
    old, graphed.w = graphed.w, torch.randn(16, 8)
    graphed.warm()
    assert graphed.recorder.recorded == 2
    replays = graphed.control.replays
    graphed.check(w=old)
    assert graphed.control.replays == replays + 1 and graphed.recorder.recorded == 2


def test_an_input_whose_address_never_returns_is_copied(graphed):
    kept = []
    for _ in range(30):
        kept.append(torch.randn(12, 16))
        graphed.check(kept[-1])
    assert graphed.recorder.recorded == 1 and graphed.control.replays >= 30 - 2 * MAX_ADDRESSES
    assert graphed.run.held_bytes == kept[0].nbytes
    graphed.check(torch.randn(16, 12).t())  # strided
    assert graphed.control.replays == graphed.recorder.replayed


def test_results_that_are_all_kept_are_copied_out(graphed):
    kept = [graphed.check()[:2] for _ in range(30)]
    assert graphed.control.replays > 10
    wanted = expected(graphed.x, graphed.w)
    for results in kept:
        torch.testing.assert_close(results[0], wanted[0])
        torch.testing.assert_close(results[1], wanted[1])
    assert graphed.outputs.held_bytes <= (MAX_ADDRESSES + 1) * kept[0][0].nbytes


def test_outputs_that_are_kept_do_not_move_captures(graphed):
    graphed.warm()
    kept = []
    for _ in range(10):
        kept.append(graphed.check()[0])
    assert graphed.saved_tensors.held_bytes == kept[0].nbytes


@pytest.mark.parametrize(("seconds", "pays"), [((3e-4, 3e-4), True), ((1e-4, 9e-4), False)])
def test_automatic_is_decided_by_measured_times(compiled, seconds, pays):
    graphed = Graphed(compiled, "auto", None)
    for _ in range(10):  # the device is at work: nothing is known yet
        graphed.check()
    assert not graphed.control.refused and not len(graphed.run) and graphed.recorder.stopped == RUNS
    graphed.recorder.seconds = seconds
    for _ in range(10):
        graphed.check()
    assert graphed.recorder.stopped == 2 * RUNS
    assert bool(graphed.control.replays) is pays is not bool(graphed.control.refused)
    if not pays:
        assert "does not pay" in graphed.control.refused["test"] and sum(graphed.control.ungraphed.values()) == 20


def test_no_single_round_decides(compiled):
    """Other processes were at work in one of them: two rounds in a row decide."""
    graphed, rounds = Graphed(compiled, "auto"), [(9e-4, 1e-3), (1e-4, 1e-3), (8e-4, 1e-3), (1e-4, 1e-3)]
    graphed.check()
    for seconds in rounds:
        graphed.recorder.seconds = seconds
        for _ in range(RUNS):
            assert not graphed.control.refused and not graphed.control.replays
            graphed.check()
    for _ in range(RUNS):
        graphed.check()
    assert "does not pay" in graphed.control.refused["test"]


def test_all_rounds_decide_where_no_two_agree(compiled):
    graphed = Graphed(compiled, "auto")
    graphed.check()
    for call in range(20 * RUNS):
        graphed.recorder.seconds = (9e-4, 1e-3) if call // RUNS % 2 else (1e-4, 1e-3)
        graphed.check()
    assert graphed.control.refused and graphed.recorder.stopped == 6 * RUNS


@pytest.mark.parametrize("always", [True, False])
def test_disturbed_runs_do_not_count(compiled, always):
    """The thread had no processor meanwhile; where that is always so, disturbed runs decide."""
    graphed = Graphed(compiled, "auto")
    graphed.recorder.seconds, graphed.recorder.disturbed = (1.0, 1.0), True
    for _ in range(1 + 4 * RUNS):
        graphed.check()
    if not always:
        graphed.recorder.seconds, graphed.recorder.disturbed = (1e-4, 1e-3), False
    for _ in range(3 * RUNS):
        graphed.check()
    assert bool(graphed.control.replays) is always is not bool(graphed.control.refused), graphed.control


def test_a_timed_run_that_raised_does_not_count(compiled):
    """Memory ran out in one of the first runs: the next ones are timed in its place."""
    graphed = Graphed(compiled, "auto")
    execute, fails = graphed.run._execute, iter([False, False, True, False, False])

    def failing(inputs, **given):
        if next(fails, False):
            raise torch.OutOfMemoryError("none is left")
        return execute(inputs, **given)

    graphed.run._execute = failing
    graphed.check(), graphed.check()
    with pytest.raises(torch.OutOfMemoryError):
        graphed.check()
    graphed.warm(11)
    assert graphed.control.replays and not graphed.control.refused and graphed.recorder.stopped == 2 * RUNS


@pytest.mark.parametrize(("seconds", "pays"), [(1e-3, True), (1e-10, False)])
def test_automatic_copies_what_takes_less_than_the_launches(compiled, seconds, pays):
    graphed, kept = Graphed(compiled, "auto"), []
    graphed.recorder.seconds = seconds, seconds
    for _ in range(20):
        kept.append(torch.randn(12, 16))
        graphed.check(kept[-1])
    assert bool(graphed.control.replays) is pays is not ("lie elsewhere" in graphed.control.refused.get("test", ""))


@pytest.mark.parametrize("mode", ["auto", True])
def test_automatic_holds_no_copies_of_parameters_that_move(compiled, monkeypatch, mode):
    """FSDP gathers its parameters for each call."""
    monkeypatch.setattr(module, "MAX_PARAMETER_BYTES", 500)
    graphed, kept = Graphed(compiled, mode), []
    for _ in range(20):
        kept.append(torch.nn.Parameter(torch.randn(16, 8), requires_grad=False))
        graphed.check(w=kept[-1])
    assert ("parameters lie elsewhere" in graphed.control.refused.get("test", "")) is (mode == "auto")
    assert bool(graphed.control.replays) is (mode is True)


def test_what_one_size_has_shown_holds_for_others():
    verdicts = Verdicts()
    assert verdicts.of(10) is None
    verdicts.learn(10, 1.0)
    verdicts.learn(50, 0.9)
    assert [verdicts.of(work) for work in (1, 10, 11, 49, 50, 90)] == [True, True, None, None, False, False]
    verdicts.learn(60, 1.5)  # it was something else that took the device's time; three halves would do
    assert [verdicts.of(work) for work in (1, 60, 90, 91)] == [True, True, True, None]
    verdicts.learn(5, 0.1)
    assert [verdicts.of(work) for work in (1, 5, 60)] == [None, False, False]


def test_another_size_is_not_timed_again(compiled):
    first, second = (Graphed(compiled, "auto", verdicts=verdicts) for verdicts in [Verdicts()] * 2)
    first.warm(9)
    assert first.recorder.stopped == 2 * RUNS
    second.warm(3)
    assert not second.recorder.stopped and second.control.ungraphed == {"warm-up": 1, "addresses that are new": 1}


@pytest.mark.parametrize(("most", "spare"), [(700, 1 << 20), (1 << 20, 700)])
def test_automatic_holds_only_so_much(compiled, monkeypatch, most, spare):
    monkeypatch.setattr(module, "MAX_HELD_BYTES", most)
    graphed, forced = Graphed(compiled, "auto"), Graphed(compiled)
    graphed.recorder.spare = forced.recorder.spare = spare
    for _ in range(9):
        graphed.check(), forced.check()
    assert graphed.control.refused["test"] == "memory of results would be held: 768 bytes" and forced.control.replays


@pytest.mark.parametrize(
    ("backward", "most", "holds"),
    [((1e-3, 1e-3), 767, True), ((1e-4, 1e-3), 767, False), ((1e-4, 1e-3), 768, True), (None, 767, False)],
    ids=["beside a recorded backward", "beside a launched one", "little memory", "no backward"],
)
def test_automatic_holds_much_memory_only_if_the_backward_is_recorded(compiled, monkeypatch, backward, most, holds):
    """The backward would need memory of its own while a recorded forward's saved tensors are not freed."""
    monkeypatch.setattr(module, "MAX_ALONE_BYTES", most)
    other = program([((12, 16), "float32"), ((16, 8), "float32")], lambda emit, x, w: [emit(R.matmul(x, w))])
    recorders: list[HostRecorder] = []

    def recorder(_backend, of):
        recorders.append(HostRecorder(of))
        return recorders[-1]

    monkeypatch.setattr(type(compiled.backend), "recorder", recorder)
    control = RecordedGraphs("auto")
    entry = EntryGraphs(control)
    forward = entry.forward(compiled, compiled.executor, compiled, 1, 1)
    run_backward = entry.backward(other, other.executor, other, 0)
    recorders[0].seconds, recorders[1].seconds = (1e-3, 1e-3), backward
    x, w = torch.randn(12, 16), torch.randn(16, 8)
    for _ in range(20):
        for ours, theirs in zip(forward([x, w]), expected(x, w), strict=True):
            torch.testing.assert_close(ours, theirs)
        if backward:
            torch.testing.assert_close(run_backward([x, w])[0], x @ w)
    assert bool(recorders[0].replayed) is holds
    if backward:
        assert bool(recorders[1].replayed) is (backward[0] == backward[1])
        assert ("would be held" in control.refused.get("test", "")) is not holds


def test_a_forward_beside_a_backward_that_cannot_be_recorded_says_why_it_is_not(compiled, monkeypatch):
    monkeypatch.setattr(module, "MAX_ALONE_BYTES", 767)
    other = program([((12, 16), "float32"), ((16, 8), "float32")], lambda emit, x, w: [emit(R.matmul(x, w))])

    def recorder(_backend, of):
        made = HostRecorder(of)
        made.refuses = "a collective waits for other processes" if of is other else None
        return made

    monkeypatch.setattr(type(compiled.backend), "recorder", recorder)
    control = RecordedGraphs("auto")
    entry = EntryGraphs(control)
    forward = entry.forward(compiled, compiled.executor, compiled, 1, 1)
    entry.backward(other, other.executor, other, 0)
    for _ in range(12):
        forward([torch.randn(12, 16), torch.randn(16, 8)])
    assert not control.replays and control.ungraphed["memory of results would be held: 768 bytes"]


def test_off_means_off(compiled):
    graphed = Graphed(compiled, False)
    for _ in range(10):
        graphed.check()
    assert not graphed.recorder.recorded and not graphed.control.ungraphed and "off" in repr(graphed.control)


def test_a_recording_that_fails_is_not_tried_again(graphed):
    graphed.recorder.fails = RuntimeError("operation not permitted\nwhen capturing")
    for _ in range(10):
        graphed.check()
    (reason,) = graphed.control.refused.values()
    assert reason == "recording failed: RuntimeError: operation not permitted"
    assert graphed.control.ungraphed[reason] == 7 and not graphed.control.replays
    assert reason in repr(graphed.control)


def test_ctrl_c_while_recording_is_the_users(graphed):
    for _ in range(3):
        graphed.check()
    graphed.recorder.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        graphed.check()
    graphed.recorder.fails = None
    graphed.warm()


def test_a_program_that_cannot_be_recorded_says_why(compiled):
    control, recorder = RecordedGraphs(True), HostRecorder(compiled)
    recorder.refuses = "library draw draws random numbers"
    run = GraphedExecutor(compiled, compiled.executor, recorder, control, memories(HostMemory(), HostMemory(), 1))
    run([torch.randn(12, 16), torch.randn(16, 8)])
    assert control.ungraphed == {recorder.refuses: 1} and control.refused == {"test": recorder.refuses}


def test_a_users_own_capture_is_left_alone(graphed):
    graphed.warm()
    replays = graphed.control.replays
    graphed.recorder.capturing = True
    graphed.check()
    assert graphed.control.replays == replays
    assert graphed.control.ungraphed["somebody records a graph of his own"] == 1


def test_each_stream_has_recordings_of_its_own(graphed):
    graphed.warm()
    graphed.recorder.now = 1
    graphed.warm()
    assert graphed.recorder.recorded == 2
    graphed.recorder.now = 0
    replays = graphed.control.replays
    graphed.check()
    assert graphed.control.replays == replays + 1


def test_threads_do_not_wait_for_one_another(graphed):
    graphed.warm()
    with graphed.run._shared.lock:
        thread = threading.Thread(target=graphed.check)
        thread.start()
        thread.join()
    assert graphed.control.ungraphed["another thread is in the program"] == 1


def test_a_thread_runs_by_itself_before_it_records(graphed):
    """Libraries make handles for each thread, for which memory is taken: a capture would fail."""
    for _ in range(3):
        graphed.check()
    recorded = []

    def work():
        for _ in range(3):
            graphed.check()
            recorded.append(graphed.recorder.recorded)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert recorded == [0, 1, 1] and graphed.control.ungraphed["the first run of a thread"] == 1


def test_inputs_are_let_go_where_they_are_consumed(graphed):
    graphed.warm()
    given = [torch.randn(12, 16), graphed.w]
    for _ in range(8):
        inputs = list(given)
        made = graphed.run(inputs, consume=True)
        assert inputs == []
        torch.testing.assert_close(made[0], expected(*given)[0])


def test_wrong_inputs_are_refused_as_ever(graphed):
    graphed.warm()
    with pytest.raises(ValueError, match="wanted"):
        graphed.run([torch.randn(3, 3), graphed.w])
    graphed.check()


def test_recordings_of_a_module_are_bounded(compiled, monkeypatch):
    monkeypatch.setattr(control_module, "MAX_RECORDINGS", 3)
    control = RecordedGraphs(True)
    runs = []
    for _ in range(5):
        graphed = Graphed(compiled)
        graphed.run._control = control
        control.enroll(graphed.run)
        runs.append(graphed.warm())
        assert control.recordings <= 3
    assert [len(each.run) for each in runs] == [0, 0, 1, 1, 1]
    runs[0].warm()
    assert control.recordings == 3


def test_programs_that_take_each_others_place_give_up(compiled, monkeypatch):
    monkeypatch.setattr(control_module, "MAX_RECORDINGS", 1)
    control, runs = RecordedGraphs(True), [Graphed(compiled) for _ in range(2)]
    for each in runs:
        each.run._control = control
        control.enroll(each.run)
    for _ in range(8):
        for each in runs:
            for _ in range(4):
                each.check()
    assert sum(each.recorder.recorded for each in runs) < 12
    assert any("have more use of graphs" in reason for reason in control.refused.values())


def test_a_profiler_sees_replays(graphed):
    graphed.warm()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        graphed.check()
    assert any(event.name == "tvm: test, recorded" for event in profile.events())


def test_addresses_that_keep_changing_are_buffered_in_the_end(compiled):
    """More combinations of addresses than recordings that are kept."""
    graphed = Graphed(compiled)
    xs, ws = ([torch.randn(*shape) for _ in range(MAX_ADDRESSES)] for shape in ((12, 16), (16, 8)))
    for call in range(200):
        graphed.check(xs[call % 3], ws[call // 3 % 3])
    assert graphed.control.replays > 100 and len(graphed.run) <= 9


def test_what_is_recorded_goes_with_its_owner(compiled):
    graphed = Graphed(compiled).warm()
    control = graphed.control
    assert control.recordings == 1
    del graphed
    gc.collect()
    assert control.recordings == 0 and control.held_bytes == 0


def test_inference_mode_and_gradients_around_it(graphed):
    graphed.warm()
    with torch.inference_mode():
        made = graphed.check()
        assert made[0].is_inference()
        for _ in range(8):
            graphed.check(torch.randn(12, 16))
    graphed.w.requires_grad_()
    made = graphed.run([graphed.x, graphed.w])
    assert not made[0].requires_grad and not made[0].is_inference()
    for _ in range(8):
        graphed.run([torch.randn(12, 16, requires_grad=True), graphed.w])
