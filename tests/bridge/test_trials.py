"""Trials: candidates have turns within their limits, margins decide, choices are remembered, damage is a new trial."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from bridge.artifact import current_store
from bridge.base.session import SESSION
from bridge.trials import (
    KERNELS,
    Pace,
    Question,
    Spans,
    Trials,
    as_quick,
    chosen,
    ratios,
    seconds_of,
    shortest,
)
from tests.bridge.clock import Clock


class Turns(Clock):
    """A clock whose steps note their names, in turns."""

    def __init__(self):
        super().__init__()
        self.names = []

    def steps(self, **seconds):
        return {
            name: self._noted(name, self.step(*(each if isinstance(each, tuple) else (each,))))
            for name, each in seconds.items()
        }

    def _noted(self, name, step):
        def run():
            self.names.append(name)
            step()

        return run


def fails():
    raise RuntimeError("no kernel")


def test_kernels_take_turns_and_what_raises_is_left_out():
    clock = Turns()
    times = seconds_of({**clock.steps(a=1e-4, b=5e-5, slow=1.0), "no": fails}, replace(KERNELS, clock=clock))
    assert times == pytest.approx({"a": 1e-4, "b": 5e-5, "slow": 1.0})
    assert clock.names[:6] == ["a", "b", "slow"] * 2
    assert clock.names.count("slow") == 3, "hopeless after two rounds, over the time after three"


def test_short_kernels_run_several_times_in_a_row():
    clock = Turns()
    seconds_of(clock.steps(a=1e-4, b=5e-5), replace(KERNELS, clock=clock, at_a_time=4e-4))
    assert clock.names[:14] == ["a", "b", *"aaaa", *"bbbbbbbb"]


def test_the_shortest_time_counts_for_kernels_and_the_median_for_steps():
    clock = Turns()
    rounds = Pace(3, 3, warm_up=1, clock=clock).rounds(clock.steps(a=(9.0, 1.0, 2.0, 3.0), b=(9.0, 1.0, 1.0, 6.0)))
    assert rounds == [{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 3.0, "b": 6.0}]
    assert shortest(rounds) == {"a": 1.0, "b": 1.0} and ratios(rounds, "a") == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(("fewest", "most", "seconds", "wanted"), [(3, 20, 4.5, 5), (3, 20, 0.5, 3), (2, 4, 1e9, 4)])
def test_no_round_begins_when_the_time_is_over(fewest, most, seconds, wanted):
    clock = Turns()
    pace = Pace(fewest, most, seconds, warm_up=0, clock=clock)
    assert len(pace.rounds(clock.steps(a=1.0))) == wanted
    clock.now = 0.0
    count = 0
    for _ in pace.runs():
        clock.now += 1.0
        count += 1
    assert count == wanted


def test_an_error_of_a_step_is_the_callers():
    with pytest.raises(RuntimeError, match="no kernel"):
        Pace(warm_up=1).rounds({"no": fails})


@pytest.mark.parametrize("margin", [0.95, 0.97, 1 / 1.2])
def test_a_challenger_has_to_be_clearly_quicker(margin):
    randoms = random.Random(0)
    for _ in range(500):
        usual, other = (randoms.uniform(0.5, 1.5) for _ in range(2))
        wanted = "other" if other < margin * usual else "usual"
        assert chosen({"other": other, "usual": usual}, ("usual", "other"), margin) == wanted


def test_of_ways_about_as_quick_the_preferred_one_is_taken():
    seconds = {"a": 1.0, "b": 1.04, "c": 1.2}
    assert as_quick(seconds, 0.95) == ["a", "b"]
    for order in itertools.permutations("abc"):
        assert chosen(seconds, order, 0.95) == next(way for way in order if way != "c")
    assert chosen({}, "abc", 0.95) is None and chosen({"d": 1.0}, "abc", 0.95) is None


QUESTION = Question("product", "large", ("float32", 512), ("mm", "ours"), ("this machine", 2))


class Measured:
    """Seconds that a test sets; how often they were asked for."""

    def __init__(self, **seconds):
        self.seconds, self.count = seconds, 0

    def __call__(self):
        self.count += 1
        return self.seconds


def as_another_process(measure, question=QUESTION, **how):
    return Trials().choose(question, measure, 0.95, **how)


@pytest.fixture
def used_cache(tmp_path, monkeypatch):
    SESSION.reset("complaints")
    monkeypatch.setenv("BRIDGE_CACHE", "1")
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "used"))
    yield
    SESSION.reset("complaints")


def test_a_process_measures_once_and_stays_with_its_choice():
    trials, measure = Trials(), Measured(mm=1.0, ours=0.5)
    assert trials.choose(QUESTION, measure, 0.95) == "ours"
    measure.seconds = {"mm": 0.1, "ours": 0.5}
    assert trials.choose(QUESTION, measure, 0.95) == "ours" and measure.count == 1
    assert trials.choose(replace(QUESTION, machine=("this machine", 3)), measure, 0.95) == "mm" and measure.count == 2
    trials.clear()
    assert trials.choose(QUESTION, measure, 0.95) == "mm" and measure.count == 3 and len(trials.decisions) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(QUESTION, kind="chain"),
        replace(QUESTION, what=("float32", 513)),
        replace(QUESTION, ways=("mm", "ours", "theirs")),
        replace(QUESTION, machine=("another machine", 2)),
    ],
)
def test_the_disk_has_the_seconds_of_this_question_alone(used_cache, other):
    measure = Measured(mm=1.0, ours=0.5)
    assert [as_another_process(measure) for _ in range(2)] == ["ours"] * 2 and measure.count == 1
    assert as_another_process(measure, preferred=("mm", "ours")) == "ours"
    measure.seconds = {"mm": 0.1, "ours": 0.5}
    assert as_another_process(measure, other) == "mm" and measure.count == 2
    assert as_another_process(measure) == "ours" and measure.count == 2
    assert as_another_process(measure, kept=False) == "mm" and measure.count == 3


@pytest.mark.parametrize("damage", [lambda content: content[:-2], lambda content: b"", lambda content: content + b"x"])
def test_damage_on_the_disk_is_a_new_trial(used_cache, damage):
    measure = Measured(mm=1.0, ours=0.5)
    as_another_process(measure)
    for path in current_store().files():
        path.write_bytes(damage(path.read_bytes()))
    assert [as_another_process(measure) for _ in range(2)] == ["ours"] * 2 and measure.count == 2


def test_an_error_of_the_timing_is_the_callers_and_nothing_is_kept(used_cache):
    with pytest.raises(RuntimeError, match="no kernel"):
        as_another_process(fails)
    assert not list(current_store().files())
    assert as_another_process(Measured()) == "mm"


def test_a_decision_tells_what_was_tried(caplog):
    trials = Trials()
    with caplog.at_level("INFO", "bridge.compile"):
        trials.choose(QUESTION, Measured(mm=1.0, ours=0.5), 0.95)
    (decision,) = trials.decisions
    assert (
        str(decision) == "product large: ours (milliseconds: mm 1000.000, ours 500.000)"
        and str(decision) in caplog.text
    )


def test_choices_of_another_process_are_taken_unless_they_contradict():
    trials, other = Trials(), replace(QUESTION, what=("float64", 512))
    measure = Measured(mm=1.0, ours=0.5)
    assert trials.adopt({}) and trials.adopt({QUESTION: "mm"})
    assert trials.choose(QUESTION, measure, 0.95) == "mm" and not measure.count
    assert not trials.adopt({other: "ours", QUESTION: "ours"})
    assert trials.choose(other, Measured(mm=0.1, ours=0.5), 0.95) == "mm", "all or none of them"


def test_the_number_of_trials_of_a_kind_is_bounded(monkeypatch):
    monkeypatch.setattr("bridge.trials._MOST", 2)
    trials, measure = Trials(), Measured(mm=1.0, ours=0.5)
    questions = [replace(QUESTION, what=(number,)) for number in range(3)]
    assert [trials.choose(each, measure, 0.95) for each in questions * 2] == ["ours", "ours", "mm"] * 2
    assert trials.choose(replace(QUESTION, kind="chain"), measure, 0.95) == "ours" and measure.count == 3


def test_parts_of_a_run_are_timed_behind_the_device():
    clock, waits = Clock(), []
    spans = Spans(lambda: waits.append(clock.now), clock)
    with spans.part("all"):
        clock.now += 1.0
        for _ in range(2):
            with spans.part("inner"):
                clock.now += 2.0
    assert spans.seconds == {"all": 5.0, "inner": 4.0} and waits == [0.0, 1.0, 3.0, 3.0, 5.0, 5.0]
