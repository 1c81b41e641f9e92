"""A/B timing: alternative implementations, timed in turns → the one to use; cached in the process and on disk, logged.

The only place that chooses by the clock:

1. :class:`Pace` times candidates in rounds: in each round every candidate has a turn, so that a slow moment of the
   machine affects all. :func:`shortest` takes the minimum over rounds of kernels, since other load only lengthens them;
   :func:`ratios` takes the median over rounds of whole steps.
2. :func:`as_quick` and :func:`chosen` decide with a margin: among candidates about as quick as the quickest, the order
   of preference decides, not the clock.
3. :class:`Trials` answers a :class:`Question` once per process and measures it once per machine. The disk cache keeps
   the seconds, not the choice: every process derives the same choice from them.
4. A :class:`Decision` prints the candidates, their times and the choice; ``BRIDGE_LOGS=compile`` shows each.

:class:`Spans` and :class:`RunTimer` time code without an alternative: parts of a forward, and launches against the
kernels that they launch.
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
from bridge.base.torch_internals import pytree

_LOG = channel("compile")

Step = Callable[[], object]
"""Runs a candidate once, and returns when it is finished."""

Rounds = list[dict[str, float]]
"""Seconds of the candidates that had a turn, round by round."""

_IMPOSSIBLE = (RuntimeError, ValueError, NotImplementedError)
"""Exceptions of a candidate for which torch has no kernel."""


def losses_of(result: object) -> list[torch.Tensor]:
    """The tensors of a result from which a training loop runs backward: the scalars that require grad, or else all."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return [leaf for leaf in leaves if leaf.ndim == 0] or leaves


@dataclass(frozen=True)
class Pace:
    """Number of rounds and time limits of a timing.

    Attributes:
        fewest, most: rounds.
        seconds: time limit, warm-up included: after it, and after the fewest rounds, no further round begins.
        warm_up: runs of each candidate before the first round.
        at_a_time: seconds of one turn: shorter candidates run several times in a row.
        hopeless: after two rounds, a candidate slower than this multiple of the quickest has no further turn.
        clock: returns seconds.
    """

    fewest: int = 3
    most: int = 20
    seconds: float = math.inf
    warm_up: int = 1
    at_a_time: float = 0.0
    hopeless: float = math.inf
    clock: Callable[[], float] = time.perf_counter

    def rounds(self, steps: Mapping[str, Step], leave_out: tuple[type[Exception], ...] = ()) -> Rounds:
        """Times candidates in turns; one that raises an exception of ``leave_out`` in its warm-up has no turn."""
        begun = self.clock()
        repeats = self._warmed_up(steps, leave_out)
        found: Rounds = []
        while len(found) < self.most and not (len(found) >= self.fewest and self.clock() - begun > self.seconds):
            found.append(self._round({name: steps[name] for name in repeats}, repeats, found))
        return found

    def runs(self) -> Iterator[int]:
        """Yields the number of each run of a single candidate, until the limits are reached."""
        begun = self.clock()
        for number in range(self.most):
            if number >= self.fewest and self.clock() - begun > self.seconds:
                return
            yield number

    def _warmed_up(self, steps: Mapping[str, Step], leave_out: tuple[type[Exception], ...]) -> dict[str, int]:
        """Warms up the candidates → how often each runs in one turn."""
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
        for name in steps:
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


def shortest(rounds: Rounds) -> dict[str, float]:
    """The shortest time of each candidate."""
    found: dict[str, float] = {}
    for each in rounds:
        found |= {name: min(spent, found.get(name, math.inf)) for name, spent in each.items()}
    return found


def ratios(rounds: Rounds, of: str) -> dict[str, float]:
    """Each candidate's seconds divided by candidate ``of``'s: the median over the rounds."""
    return {name: statistics.median(each[name] / each[of] for each in rounds) for name in rounds[0]}


KERNELS = Pace(fewest=3, most=20, seconds=4e-3, warm_up=1, at_a_time=30e-6, hopeless=2.0)
"""The pace for kernels: milliseconds in all."""


def seconds_of(steps: Mapping[str, Step], pace: Pace = KERNELS) -> dict[str, float]:
    """The shortest time of each candidate in seconds; candidates for which torch has no kernel are left out."""
    return shortest(pace.rounds(steps, _IMPOSSIBLE))


def as_quick(seconds: Mapping[str, float], margin: float) -> list[str]:
    """The candidates about as quick as the quickest one.

    Args:
        margin: a candidate is clearly quicker than another if it takes less than this share of its time.
    """
    limit = min(seconds.values(), default=0.0) / margin
    return [way for way, spent in seconds.items() if spent <= limit]


def chosen(seconds: Mapping[str, float], preferred: Sequence[str], margin: float) -> str | None:
    """The first preferred candidate about as quick as the quickest one; ``None``: there is none."""
    near = as_quick(seconds, margin)
    return next((way for way in preferred if way in near), None)


@dataclass(frozen=True)
class Question:
    """The key of a choice: everything that the candidates' seconds depend on.

    Attributes:
        kind: of the operation, as in ``"product"``.
        name: short description of the operation, for logs.
        what: full description of the operation, as plain data.
        ways: the candidates; the first is the default, used if nothing can be timed.
        machine: backend or target, number of threads, processor, settings of libraries.
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
        seconds: of the candidates that could be timed.
        choice: the chosen candidate.
    """

    question: Question
    seconds: Mapping[str, float]
    choice: str

    def __str__(self) -> str:
        told = ", ".join(f"{way} {1e3 * spent:.3f}" for way, spent in self.seconds.items())
        return f"{self.question}: {self.choice} (milliseconds: {told})"


Measure = Callable[[], Mapping[str, float]]
"""Times candidates of a question together; returns their seconds."""

KIND = "trial"

_MOST = 512
"""Most questions of one kind that a process times; further ones get the default."""


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
    ) -> str:
        """Returns the candidate to use.

        Args:
            measure: times the candidates if neither this process nor the disk cache has their seconds.
            margin: see :func:`as_quick`.
            preferred: the candidates, the most preferred first; by default in the question's order.
            kept: whether to read and write the disk cache.
        """
        with self._alone(question.kind):
            if question in self._choices:
                return self._choices[question]
            choice = question.ways[0]
            if self._counts[question.kind] < _MOST:
                seconds = _on_disk(question, measure) if kept else measure()
                choice = chosen(seconds, question.ways if preferred is None else preferred, margin) or choice
                decision = Decision(question, seconds, choice)
                _LOG.info("%s", decision)
                self.decisions.append(decision)
            self._set(question, choice)
            return choice

    def adopt(self, choices: Mapping[Question, str]) -> bool:
        """Adopts choices of another process, all of one kind, unless one contradicts an own choice; whether it did."""
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
        """Forgets all choices; the disk cache keeps the seconds."""
        self._choices.clear()
        self._counts.clear()
        self.decisions.clear()

    def _alone(self, kind: str) -> AbstractContextManager:
        """Lock per kind, not one for all: a trial of one kind may need choices of another."""
        return held(self._locks.setdefault(kind, renewed_in_children(threading.RLock())))

    def _set(self, question: Question, way: str) -> None:
        self._counts[question.kind] += question not in self._choices
        self._choices[question] = way


TRIALS = SESSION.cache("choices", Trials())


def _on_disk(question: Question, measure: Measure) -> Mapping[str, float]:
    """The question's seconds: from the disk cache, or measured now and stored there."""
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
        wait: synchronizes the device; called before and after each part.
    """

    def __init__(self, wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter):
        self.seconds: Counter[str] = Counter()
        self._wait, self._clock = wait, clock

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context that adds its duration to the part's seconds."""
        self._wait()
        begun = self._clock()
        try:
            yield
        finally:
            self._wait()
            self.seconds[name] += self._clock() - begun


_LEAST_WORKED = 0.9
"""A run is undisturbed if its thread had a processor for at least this share of the host's time."""

_THREAD_TIME_IS_FINE = time.get_clock_info("thread_time").resolution < 1e-6


class RunTimer:
    """Times one run on the host and on the current GPU stream, without waiting for the device.

    Attributes:
        is_disturbed: whether this thread lacked a processor for part of the run; valid after ``stop``.
    """

    is_disturbed = False

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record()
        self._host, self._worked = -time.perf_counter(), -time.thread_time()

    def stop(self) -> None:
        """Ends the run."""
        self._worked += time.thread_time()
        self._host += time.perf_counter()
        self.is_disturbed = _THREAD_TIME_IS_FINE and self._worked < _LEAST_WORKED * self._host
        self._end.record()

    def seconds(self) -> tuple[float, float] | None:
        """Seconds on the host and on the device; ``None`` while the device still works on the run."""
        return (self._host, self._begin.elapsed_time(self._end) / 1e3) if self._end.query() else None
