"""Trials: ways to do one thing, timed by turns → the way to take; remembered in this process and on disk, and told.

The only place that chooses by the clock:

1. :class:`Pace` times candidates in rounds: in each round every candidate has a turn, so that a slow moment of the
   machine meets all of them. :func:`shortest` reads rounds of kernels, which others on the machine make longer and
   never shorter; :func:`ratios` reads rounds of whole steps by their medians.
2. :func:`as_quick` and :func:`chosen` decide with a margin: among ways that are about as quick as the quickest, the
   order of preference decides, not the clock. :func:`is_faster` decides a :class:`Race` of two by its noise.
3. :class:`Trials` settles a :class:`Question` once per process and once per machine. The disk cache keeps the seconds,
   not the choice: every process decides from them anew, the same way.
4. A :class:`Decision` prints what was tried, its times and the choice; ``BRIDGE_LOGS=compile`` shows each.

:class:`Spans` and :class:`RunTimer` time runs that have no alternative: parts of a forward, and launches beside what
they launch.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from bridge.artifact import current_store, from_parts, made_once, of_this_package, to_parts
from bridge.base.log import channel
from bridge.base.session import SESSION
from bridge.base.threads import held, renewed_in_children

__all__ = ["KERNELS", "KIND", "TRIALS", "Decision", "Pace", "Pairs", "Question", "Race", "RunTimer", "Spans", "Step"]
__all__ += ["Trials", "as_quick", "chosen", "is_faster", "ratio_of", "ratios", "seconds_of", "shortest"]

_LOG = channel("compile")

Step = Callable[[], object]
"""Runs a candidate once, and returns when that is over."""

Rounds = list[dict[str, float]]
"""Seconds of the candidates that had a turn, round by round."""

_IMPOSSIBLE = (RuntimeError, ValueError, NotImplementedError)
"""What a candidate raises that torch has no kernel for."""


@dataclass(frozen=True)
class Pace:
    """How long candidates are timed.

    Attributes:
        fewest, most: rounds.
        seconds: after which no further round begins, once there were the fewest; warm-up included.
        warm_up: runs of each candidate before the first round.
        at_a_time: seconds of one turn: shorter candidates run several times in a row.
        hopeless: times the quickest one's seconds, after two rounds, from which on a candidate has no further turn.
        clock: seconds.
    """

    fewest: int = 3
    most: int = 20
    seconds: float = math.inf
    warm_up: int = 1
    at_a_time: float = 0.0
    hopeless: float = math.inf
    clock: Callable[[], float] = time.perf_counter

    def rounds(self, steps: Mapping[str, Step], leave_out: tuple[type[Exception], ...] = ()) -> Rounds:
        """Times candidates by turns; one that raises an exception of ``leave_out`` in its warm-up has no turn."""
        begun = self.clock()
        repeats = self._warmed_up(steps, leave_out)
        found: Rounds = []
        again = 0
        while len(found) < self.most and not (len(found) >= self.fewest and self._is_enough(found, begun)):
            found.append(self._round({name: steps[name] for name in repeats}, repeats, found))
            if len(found) >= self.fewest and again < self.most:
                kept = self._kept(found)
                again += len(found) - len(kept)
                found = kept
        return found

    def runs(self) -> Iterator[int]:
        """Numbers of the runs of one thing that has no alternative, as long as another one is to begin."""
        begun = self.clock()
        for number in range(self.most):
            if number >= self.fewest and self.clock() - begun > self.seconds:
                return
            yield number

    def _warmed_up(self, steps: Mapping[str, Step], leave_out: tuple[type[Exception], ...]) -> dict[str, int]:
        """How often each candidate runs in one turn."""
        repeats = dict.fromkeys(steps, 1)
        for _ in range(self.warm_up):
            for name in list(repeats):
                try:
                    spent = self._timed(steps[name], 1)
                except leave_out as error:
                    _LOG.debug("%s cannot be measured: %s", name, error)
                    del repeats[name]
                    continue
                repeats[name] = max(1, math.ceil(self.at_a_time / max(spent, 1e-7)))
        return repeats

    def _round(self, steps: Mapping[str, Step], repeats: Mapping[str, int], before: Rounds) -> dict[str, float]:
        best, found = shortest(before), {}
        for name in self._order(list(steps), len(before)):
            if len(before) > 1 and best[name] > self.hopeless * min(best.values()):
                continue
            found[name] = self._timed(steps[name], repeats[name])
            best[name] = min(best.get(name, math.inf), found[name])
        return found

    def _timed(self, step: Step, count: int) -> float:
        begun = self.clock()
        for _ in range(count):
            step()
        return max(self.clock() - begun, 1e-9) / count

    def _order(self, names: list[str], number: int) -> list[str]:
        return names

    def _is_enough(self, found: Rounds, begun: float) -> bool:
        return self.clock() - begun > self.seconds

    def _kept(self, found: Rounds) -> Rounds:
        """The rounds that count; others are run again."""
        return found


def shortest(rounds: Rounds) -> dict[str, float]:
    """The shortest time of each candidate."""
    found: dict[str, float] = {}
    for each in rounds:
        found |= {name: min(spent, found.get(name, math.inf)) for name, spent in each.items()}
    return found


def ratios(rounds: Rounds, of: str) -> dict[str, float]:
    """Each candidate's seconds as a share of one candidate's: the median of the rounds' shares."""
    return {name: statistics.median(each[name] / each[of] for each in rounds) for name in rounds[0]}


KERNELS = Pace(fewest=3, most=20, seconds=4e-3, warm_up=1, at_a_time=30e-6, hopeless=2.0)
"""Of kernels, within milliseconds."""


def seconds_of(steps: Mapping[str, Step], pace: Pace = KERNELS) -> dict[str, float]:
    """The shortest time of each of some kernels; one that torch has no kernel for is left out."""
    return shortest(pace.rounds(steps, _IMPOSSIBLE))


Pairs = list[tuple[float, float]]
"""Seconds of the one and of the other, round by round."""

_SPREAD = 1.4826
"""Standard deviations in a median absolute deviation, of a normal distribution."""

_OF_A_MEDIAN = 1.2533
"""Times the error of a mean that a median's is."""

_DEVIATIONS = 3.0
"""Of the median ratio, that it has to be below 1: one in 700 is that far off by chance."""

_WINS = 0.75
"""Rounds at least in which the faster one was faster."""


def ratio_of(pairs: Pairs) -> float:
    """The median of the rounds' ratios, second to first."""
    return statistics.median(b / a for a, b in pairs)


def is_faster(pairs: Pairs, gain: float) -> bool:
    """Whether the second is faster by more than ``gain`` (a part of the time) and by more than the noise."""
    if len(pairs) < 3:
        return False
    shares = [b / a for a, b in pairs]
    middle = statistics.median(shares)
    spread = _SPREAD * statistics.median(abs(each - middle) for each in shares)
    error = _OF_A_MEDIAN * spread / math.sqrt(len(shares))
    wins = sum(each < 1 for each in shares) / len(shares)
    return middle + max(gain, _DEVIATIONS * error) < 1 and wins >= _WINS


@dataclass(frozen=True)
class Race(Pace):
    """A pace for two whole steps, whose order is swapped from round to round; calling it gives their seconds.

    A challenger that is not ahead after the fewest rounds is given up. A round in which one of the two took far longer
    than it usually does is run again.

    Attributes:
        outlier: times the median of its own seconds, from which on a round is run again.
    """

    fewest: int = 5
    most: int = 21
    seconds: float = 6.0
    warm_up: int = 2
    outlier: float = 1.5

    def __call__(self, one: Step, other: Step) -> Pairs:
        """Pairs of seconds of the known step and of its challenger."""
        return _pairs(self.rounds({"one": one, "other": other}))

    def _order(self, names: list[str], number: int) -> list[str]:
        return names[::-1] if number % 2 else names

    def _is_enough(self, found: Rounds, begun: float) -> bool:
        return super()._is_enough(found, begun) or ratio_of(_pairs(found)) >= 1

    def _kept(self, found: Rounds) -> Rounds:
        limits = {name: self.outlier * statistics.median(each[name] for each in found) for name in found[0]}
        return [each for each in found if all(spent <= limits[name] for name, spent in each.items())]


def _pairs(rounds: Rounds) -> Pairs:
    return [(each["one"], each["other"]) for each in rounds]


def as_quick(seconds: Mapping[str, float], margin: float) -> list[str]:
    """The ways that are about as quick as the quickest one.

    Args:
        margin: the part of a way's time that a quicker one has to stay below to be clearly quicker.
    """
    limit = min(seconds.values(), default=0.0) / margin
    return [way for way, spent in seconds.items() if spent <= limit]


def chosen(seconds: Mapping[str, float], preferred: Sequence[str], margin: float) -> str | None:
    """The first of the preferred ways that is about as quick as the quickest one; ``None``: none of them was timed."""
    near = as_quick(seconds, margin)
    return next((way for way in preferred if way in near), None)


@dataclass(frozen=True)
class Question:
    """Which way is to be taken: everything that the ways' seconds depend on.

    Attributes:
        kind: of what is done, as in ``"product"``.
        name: what is done, for people.
        what: the same in full, as plain data.
        ways: the candidates, first the usual one, which is taken where nothing can be timed.
        machine: what runs it: backend or target, number of threads, processor, settings of libraries.
    """

    kind: str
    name: str
    what: tuple | str
    ways: tuple[str, ...]
    machine: tuple

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Decision:
    """A question's ways, timed.

    Attributes:
        seconds: of the ways that could be timed.
        choice: the way that is taken.
        why: there is no time, where a trial was impossible.
    """

    question: Question
    seconds: Mapping[str, float]
    choice: str
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.question}: no trial, {self.choice} is taken: {self.why}"
        told = ", ".join(f"{way} {1e3 * spent:.3f}" for way, spent in self.seconds.items())
        return f"{self.question}: {self.choice} (milliseconds: {told})"


Measure = Callable[[], Mapping[str, float]]
"""Gives the seconds of some of a question's ways, all of one moment."""

KIND = "trial"
"""Of artifacts in the disk cache."""

_MOST = 512
"""Questions of one kind that a process has trials of; further ones get the usual way."""


class Trials:
    """The decisions of a process; threads share them, and equal questions get equal choices from then on."""

    def __init__(self) -> None:
        self._choices: dict[Question, str] = {}
        self._counts: Counter[str] = Counter()
        self._locks: dict[str, threading.RLock] = {}
        self.decisions: list[Decision] = []

    def choose(
        self,
        question: Question,
        measure: Measure,
        margin: float,
        preferred: Sequence[str] | None = None,
        *,
        kept: bool = True,
        impossible: tuple[type[Exception], ...] = (),
    ) -> str:
        """The way to take.

        Args:
            measure: times the ways, where neither this process nor the disk cache knows their seconds.
            margin: see :func:`as_quick`.
            preferred: the ways, the most welcome first; by default in the question's order.
            kept: whether the disk cache has, and is given, the seconds.
            impossible: what ``measure`` raises where there can be no trial: then the usual way is taken.
        """
        with self._alone(question.kind):
            if question in self._choices:
                return self._choices[question]
            usual = choice = question.ways[0]
            if self._counts[question.kind] < _MOST:
                try:
                    seconds = _on_disk(question, measure) if kept else measure()
                    choice = chosen(seconds, question.ways if preferred is None else preferred, margin) or usual
                    decision = Decision(question, seconds, choice)
                except impossible as error:
                    decision = Decision(question, {}, usual, str(error))
                _LOG.info("%s", decision)
                self.decisions.append(decision)
            self._set(question, choice)
            return choice

    def adopt(self, choices: Mapping[Question, str]) -> bool:
        """Makes choices of another process this one's, unless one of them contradicts its own; whether none does."""
        if not choices:
            return True
        (kind,) = {question.kind for question in choices}
        with self._alone(kind):
            if any(self._choices.get(question, way) != way for question, way in choices.items()):
                return False
            for question, way in choices.items():
                self._set(question, way)
            return True

    def clear(self) -> None:
        """Forgets all of them; the disk cache keeps their seconds."""
        self._choices.clear()
        self._counts.clear()
        self.decisions.clear()

    def _alone(self, kind: str) -> AbstractContextManager:
        """One trial of a kind at a time: a trial of one kind may need choices of another one."""
        return held(self._locks.setdefault(kind, renewed_in_children(threading.RLock())))

    def _set(self, question: Question, way: str) -> None:
        self._counts[question.kind] += question not in self._choices
        self._choices[question] = way


TRIALS = SESSION.cache("choices", Trials())
"""Of this process."""


def _on_disk(question: Question, measure: Measure) -> Mapping[str, float]:
    """The question's seconds: from the disk cache, or from a trial of now, which it is given."""
    store = current_store()
    if not store.is_usable:
        return measure()
    key = of_this_package(KIND, question.kind, question.what, list(question.ways), question.machine)

    def look() -> Mapping[str, float] | None:
        found = store.get(KIND, key)
        return None if found is None else from_parts(found.parts)

    def measure_and_keep() -> Mapping[str, float]:
        seconds = dict(measure())
        store.put(KIND, key, to_parts(seconds), str(question))
        return seconds

    return made_once(store, key, look, measure_and_keep)


class Spans:
    """Seconds of named parts of a run, by name.

    Args:
        wait: for a device that works on what was launched, before and after each part.
    """

    def __init__(self, wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter):
        self.seconds: Counter[str] = Counter()
        self._wait, self._clock = wait, clock

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time that passes inside to the part's."""
        self._wait()
        begun = self._clock()
        try:
            yield
        finally:
            self._wait()
            self.seconds[name] += self._clock() - begun


_LEAST_WORKED = 0.9
"""Of a run's time on the host, that its thread has a processor where nobody disturbs it."""

_THREAD_TIME_IS_FINE = time.get_clock_info("thread_time").resolution < 1e-6


class RunTimer:
    """The host's and the current GPU stream's seconds of one run, taken without waiting for the device.

    Attributes:
        is_disturbed: whether this thread has not had a processor for all of it; known once it has stopped.
    """

    is_disturbed = False

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record()
        self._host, self._worked = -time.perf_counter(), -time.thread_time()

    def stop(self) -> None:
        """The end of the run."""
        self._worked += time.thread_time()
        self._host += time.perf_counter()
        self.is_disturbed = _THREAD_TIME_IS_FINE and self._worked < _LEAST_WORKED * self._host
        self._end.record()

    def seconds(self) -> tuple[float, float] | None:
        """The host's and the device's; ``None`` while the device is at work on it."""
        return (self._host, self._begin.elapsed_time(self._end) / 1e3) if self._end.query() else None
