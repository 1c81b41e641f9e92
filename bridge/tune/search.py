"""Coordinate search: tunables in a fixed order + an A/B timing of two choices → the best choices; resumable by its log.

The incumbent begins as the default choices. For each tunable in turn, the choices that differ from the incumbent in it
alone are timed against the incumbent, one after the other; a faster one replaces it. If a pass over all tunables has
changed the incumbent, another pass follows.

The search is a function of the log's records. So an interrupted search resumes: pairs of choices in the log are not
measured again, and their seconds count.

Tunables of a call (:func:`tunables_of`): library calls and products, the longest first, since they take most of a step;
then the backend's parameters; then the partition.

:class:`TuningLog`: records ↔ lines of JSON, of any number of runs in one file. A line is on disk before the next trial
begins; a killed process leaves at most one incomplete line, which is ignored. Every record names its run: a key of the
call, the machine, threads and versions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bridge.artifact import from_text, to_text
from bridge.base.log import channel
from bridge.compile import (
    CALLS,
    PARTITION,
    PRODUCTS,
    Backend,
    CallShape,
    Choices,
    CompileOptions,
    ProductShape,
    products_and_calls,
)
from bridge.dispatch import Entry
from bridge.lowering import DEFAULT_PARTITION
from bridge.trials import Pairs, is_faster, ratio_of

__all__ = ["FASTER", "GAIN", "Outcome", "Search", "Trial", "Tunable", "TuningLog", "tunables_of"]

_LOG = channel("tune")


class TuningLog:
    """The records of one run.

    Args:
        path: the file, created by the first record; ``None``: records are kept in memory only.
        run: the key of the run.

    Attributes:
        records: the run's records, in order.
        foreign: number of lines of other runs; ``damaged``: number of lines that are no records.
    """

    def __init__(self, path: str | os.PathLike | None, run: str):
        self.path, self.run = None if path is None else Path(path), run
        self.records: list[dict[str, Any]] = []
        self._can_write = self.path is not None
        self.foreign = self.damaged = 0
        if self.path is not None and self.path.exists():
            self._read(self.path.read_bytes())

    def _read(self, content: bytes) -> None:
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            try:
                record = from_text(line)
                run = record["run"]
            except (ValueError, KeyError, TypeError):
                self.damaged += 1
                continue
            if run == self.run:
                self.records.append(record)
            else:
                self.foreign += 1
        if self.damaged:
            _LOG.warning("%s: %d damaged lines are ignored", self.path, self.damaged)
        if self.foreign:
            _LOG.info("%s: %d lines are of other calls, machines or versions", self.path, self.foreign)

    def append(self, **record: Any) -> dict[str, Any]:
        """Appends a record and flushes it to disk; returns the record as read back.

        If the file cannot be written (a full disk), it warns once, and keeps records in memory.
        """
        text = to_text({"run": self.run, **record})
        if self._can_write:
            try:
                self._write(text)
            except OSError as error:
                self._can_write = False
                _LOG.warning("%s: %s; the tuning goes on, and cannot be resumed from here", self.path, error)
        record = from_text(text)
        self.records.append(record)
        return record

    def _write(self, text: str) -> None:
        with open(self.path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # ends an incomplete line of a killed process
                    text = "\n" + text
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


TRIAL = "trial"
FASTER, NOT_FASTER = "faster", "not faster"

GAIN = 0.005
"""Least share of a step's time that a choice must gain to be accepted."""


@dataclass(frozen=True)
class Tunable:
    """One parameter of the compilation.

    Attributes:
        part, name: see :meth:`bridge.compile.Choices.having`.
        values: candidate values, in order; without a value, the default applies.
    """

    part: str
    name: Any
    values: tuple

    def choices(self, incumbent: Choices) -> Iterator[Choices]:
        """The choices that differ from the incumbent in this tunable: the default, then each value."""
        values = (incumbent.having(self.part, self.name, value) for value in self.values)
        for choices in (incumbent.without(self.part, self.name), *values):
            if choices != incumbent:
                yield choices

    def __str__(self) -> str:
        return f"{self.part} {self.name}" if self.name else self.part


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        pairs: seconds of the incumbent and of the candidate, in turns; empty if they were not timed.
        why: the reason for no timing (the candidate failed, or has the same code), or empty.
        seconds: duration of compiling and timing.
    """

    pairs: Pairs
    why: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """``"faster"``, ``"not faster"``, or the reason why the candidate was not timed."""
        return self.why or (FASTER if is_faster(self.pairs, GAIN) else NOT_FASTER)


@dataclass(frozen=True)
class Trial:
    """A candidate against the incumbent, and its outcome."""

    incumbent: Choices
    candidate: Choices
    outcome: Outcome


class CandidateBuilder(Protocol):
    """Compiles and times candidates."""

    def prepare(self, candidates: Sequence[Choices]) -> None:
        """Compiles candidates in parallel; frees the candidates of earlier calls."""

    def __call__(self, incumbent: Choices, candidate: Choices) -> Outcome:
        """Times a candidate against the incumbent."""


@dataclass
class Search:
    """One search; :meth:`run` returns the best choices.

    Attributes:
        tunables: the tunables, in order.
        track: times pairs of choices that are not in the log.
        log: the log of this run.
        seconds: time limit of the trials; after it, no further trial begins.
        told: called after each trial.
        spent: seconds of all trials so far, including earlier processes'.
        trials: number of trials so far.
        gains: for each accepted candidate, its time divided by the incumbent's.
    """

    tunables: Sequence[Tunable]
    track: CandidateBuilder
    log: TuningLog
    seconds: float
    told: Callable[[Search, Tunable, Trial], None] = lambda search, tunable, trial: None
    spent: float = 0.0
    trials: int = 0
    gains: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {
            (record["over"], record["choices"]): record
            for record in self.log.records
            if record.get("kind") == TRIAL and _is_whole(record)
        }
        self._over: set[tuple[Choices, Choices]] = set()

    def run(self) -> Choices:
        """Runs the search; returns the last incumbent."""
        incumbent, moved = Choices(), True
        while moved and self.spent < self.seconds:
            before = incumbent
            for tunable in self.tunables:
                incumbent = self._turn(tunable, incumbent)
                if self.spent >= self.seconds:
                    break
            moved = incumbent != before
        return incumbent

    def _turn(self, tunable: Tunable, incumbent: Choices) -> Choices:
        """Times a tunable's candidates against the incumbent → the new incumbent."""
        candidates = list(tunable.choices(incumbent))
        is_prepared = False
        for place, candidate in enumerate(candidates):
            if candidate == incumbent or self.spent >= self.seconds:
                continue
            key = incumbent, candidate
            if key in self._over:  # not faster in an earlier pass
                continue
            self._over.add(key)
            record = self._known.get(key)
            if record is None:
                if not is_prepared:
                    self.track.prepare([incumbent, *candidates[place:]])
                    is_prepared = True
                record = self._measure(incumbent, candidate)
            trial = Trial(incumbent, candidate, _outcome(record))
            self.spent += trial.outcome.seconds
            self.trials += 1
            if trial.outcome.verdict == FASTER:
                self.gains.append(ratio_of(trial.outcome.pairs))
                incumbent = candidate
            self.told(self, tunable, trial)
        return incumbent

    def _measure(self, incumbent: Choices, candidate: Choices) -> dict[str, Any]:
        outcome = self.track(incumbent, candidate)
        return self.log.append(
            kind=TRIAL,
            over=incumbent,
            choices=candidate,
            pairs=tuple(outcome.pairs),
            why=outcome.why,
            seconds=outcome.seconds,
            verdict=outcome.verdict,
        )


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether a trial's record has all fields."""
    try:
        _outcome(record)
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(record.get(name), Choices) for name in ("over", "choices"))


def _outcome(record: dict[str, Any]) -> Outcome:
    return Outcome([(float(a), float(b)) for a, b in record["pairs"]], str(record["why"]), float(record["seconds"]))


WAYS, FORMS = "ways", "forms"
_SHAPES = {WAYS: "product", FORMS: "call"}
"""Kind of a record → its field for the shape."""

_MOST_PRODUCTS, _MOST_CALLS = 12, 12
"""Most shapes of products, and of library calls, that are tuned in a call."""

_MOST_WAYS = 3
"""Most alternatives of one shape."""

_ABOUT_AS_FAST = 1.1
"""An alternative is tried in the whole step if it takes, timed alone, at most this multiple of the current time."""

_BUDGETS = (0.75, 0.5, 0.25)
"""Budgets of saved bytes, as shares of saving everything."""


def tunables_of(entry: Entry, partition: Any, log: TuningLog) -> list[Tunable]:
    """The tunables of an entry compiled by default; ``log`` caches the times of products' and calls' variants."""
    backend = entry.options.backend
    products, calls = _chosen(entry, backend)
    tunables = [*_calls(calls, backend, log), *_products(products, backend, log)]
    tunables += [Tunable(each.part, each.name, each.values) for each in backend.alternatives]
    if entry.plan is not None and partition == DEFAULT_PARTITION:
        tunables.append(Tunable(PARTITION, None, ("save_all", "recompute_all", *_BUDGETS)))
    return tunables


def _chosen(entry: Entry, backend: Backend) -> tuple[dict[ProductShape, str], list[CallShape]]:
    """The matrix products of forward and backward, with their algorithms; the library calls with several variants."""
    options = CompileOptions.current(backend)
    functions = [entry.programs.forward.function]
    if entry.backward is not None:
        functions.append(entry.lowered.expected_backward)
    found = [products_and_calls(function, options) for function in functions]
    calls = dict.fromkeys(call for _, each in found for call in each)
    return {product: way for each, _ in found for product, way in each}, list(calls)


def _calls(calls: Iterable[CallShape], backend: Backend, log: TuningLog) -> Iterator[Tunable]:
    """Tunables of the longest library calls with a promising variant, the longest first."""
    times = {call: _recorded(log, FORMS, call, backend.seconds_of_forms)["seconds"] for call in calls}
    ordered = sorted((call for call in times if times[call]), key=lambda call: (-times[call][call.name], str(call)))
    for call in ordered[:_MOST_CALLS]:
        if forms := _promising(call.name, times[call]):
            yield Tunable(CALLS, call, forms)


def _products(found: Mapping[ProductShape, str], backend: Backend, log: TuningLog) -> Iterator[Tunable]:
    """Tunables of the largest products with a promising algorithm, the largest first."""
    ordered = sorted(found, key=lambda product: (-product.multiplications, str(product)))
    for product in ordered[:_MOST_PRODUCTS]:
        record = _recorded(log, WAYS, product, backend.seconds_of_ways, present=found[product])
        if ways := _promising(str(record.get("present")), record["seconds"]):
            yield Tunable(PRODUCTS, product, ways)


def _promising(present: str, seconds: Mapping[str, float]) -> tuple[str, ...]:
    """The fastest alternatives that, timed alone, are about as fast as the current one."""
    limit = _ABOUT_AS_FAST * seconds.get(present, 0.0)
    ways = [way for way in sorted(seconds, key=seconds.__getitem__) if way != present and seconds[way] <= limit]
    return tuple(ways[:_MOST_WAYS])


def _recorded(log: TuningLog, kind: str, shape: Any, measure: Callable[[Any], Any], **told: Any) -> dict[str, Any]:
    """The record of the times of a product's or call's variants: from the log, or measured now and appended."""
    field, named = _SHAPES[kind], repr(astuple(shape))
    for record in log.records:
        if record.get("kind") == kind and record.get(field) == named and isinstance(record.get("seconds"), dict):
            return record
    return log.append(kind=kind, **{field: named}, **told, seconds=dict(measure(shape)))
