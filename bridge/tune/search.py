"""Search: tunables in a fixed order, the timing of two choices → the best choices found; every decision is in the log.

Race: two ways to run the same step, by turns in one process → pairs of seconds, and whether the second is faster.
Each round times both, the order swapped from round to round, so that a slow moment of the machine meets both. A round
in which one of them took far longer than it usually does is run again. What is decided rests on the pairs alone.

The incumbent begins as the default choices. For each tunable in turn, the choices that differ from the incumbent in it
are timed against the incumbent one after the other; a faster one takes its place. When a turn over all
tunables has changed something, they have another turn.

What is tried next, and what is kept, follows from the records of the log alone. So an interrupted search goes on where
it was: pairs of choices that are in the log are not measured again, and the seconds that they took count.

Knobs of a call: what of its compilation can be chosen, in the order in which it is tried.
Convolutions and products come first, the largest ahead: they take most of a step. Then the backend's numbers, then the
partition.

Tuning log: records ↔ lines of JSON, appended one by one, of any number of runs in one file.

A line is written whole, with its end, and is on disk before the next trial begins; a process that is killed leaves at
most one line without its end, which counts for nothing. Every record names the run that it belongs to: a key of the
call, the machine, threads and versions. Records of other runs are passed over.
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
    """Records of one run.

    Args:
        path: the file, made by the first record; ``None``: records are kept in memory only.
        run: the key of the run.

    Attributes:
        records: of this run, in order.
        foreign: lines of other runs; ``damaged``: lines that are no records.
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
        """Adds a record, which is on disk when this returns; the record as it will be read.

        Where the file cannot be written (a full disk), a warning says so once, and records are kept in memory.
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
                if file.read(1) != b"\n":  # of a process that was killed: its half line ends here
                    text = "\n" + text
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


TRIAL = "trial"
FASTER, NOT_FASTER = "faster", "not faster"

GAIN = 0.005
"""Part of a step's time that a choice has to gain to be taken."""


@dataclass(frozen=True)
class Tunable:
    """One thing that can be chosen.

    Attributes:
        part, name: see :meth:`bridge.compile.Choices.having`.
        values: to be tried, in this order; the default is among the choices without any.
    """

    part: str
    name: Any
    values: tuple

    def choices(self, incumbent: Choices) -> Iterator[Choices]:
        """Those that differ from the incumbent in this tunable."""
        values = (incumbent.having(self.part, self.name, value) for value in self.values)
        for choices in (incumbent.without(self.part, self.name), *values):
            if choices != incumbent:
                yield choices

    def __str__(self) -> str:
        return f"{self.part} {self.name}" if self.name else self.part


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        pairs: seconds of the incumbent and of the candidate, by turns; none where it was not raced.
        why: it was not: it failed, or it is compiled to the same code.
        seconds: that making and racing it took.
    """

    pairs: Pairs
    why: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """Whether it is faster than the incumbent."""
        return self.why or (FASTER if is_faster(self.pairs, GAIN) else NOT_FASTER)


@dataclass(frozen=True)
class Trial:
    """A candidate against the incumbent, and its outcome."""

    incumbent: Choices
    candidate: Choices
    outcome: Outcome


class CandidateBuilder(Protocol):
    """Where choices are raced."""

    def prepare(self, candidates: Sequence[Choices]) -> None:
        """Builds what they are compiled to, at the same time; choices of earlier calls are let go."""

    def __call__(self, incumbent: Choices, candidate: Choices) -> Outcome:
        """Races two."""


@dataclass
class Search:
    """One search; :meth:`run` gives the best choices.

    Attributes:
        tunables: in their order.
        track: races choices that are not in the log.
        log: what was raced, of this run.
        seconds: that all trials may take; no further one begins once they have.
        told: called after each trial.
        spent: seconds of all trials so far, of earlier processes, too.
        trials: so far.
        gains: of the candidates that took the incumbent's place, the ratio of their time to its.
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
        """The incumbent in the end."""
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
        candidates = list(tunable.choices(incumbent))
        is_prepared = False
        for place, candidate in enumerate(candidates):
            if candidate == incumbent or self.spent >= self.seconds:
                continue
            key = incumbent, candidate
            if key in self._over:  # an earlier turn's: it was not faster
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
    """Whether a record of a race has what one has."""
    try:
        _outcome(record)
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(record.get(name), Choices) for name in ("over", "choices"))


def _outcome(record: dict[str, Any]) -> Outcome:
    return Outcome([(float(a), float(b)) for a, b in record["pairs"]], str(record["why"]), float(record["seconds"]))


WAYS, FORMS = "ways", "forms"
_SHAPES = {WAYS: "product", FORMS: "call"}
"""How a record of the kind calls what it is about."""

_MOST_PRODUCTS, _MOST_CALLS = 12, 12
"""Classes of products, and of library calls, that are tried in a call."""

_MOST_WAYS = 3
"""Of one class, beside the present one."""

_ABOUT_AS_FAST = 1.1
"""Times the present way's seconds, measured by itself, up to which another one may be better in the whole step."""

_BUDGETS = (0.75, 0.5, 0.25)
"""Of captures, as parts of what saving everything would take."""


def tunables_of(entry: Entry, partition: Any, log: TuningLog) -> list[Tunable]:
    """The tunables of an entry that was compiled by default, with the strategy that the user asks for.

    ``log``: has the seconds of products' ways and of calls' forms, or is given them.
    """
    backend = entry.options.backend
    products, calls = _chosen(entry, backend)
    tunables = [*_calls(calls, backend, log), *_products(products, backend, log)]
    tunables += [Tunable(each.part, each.name, each.values) for each in backend.alternatives]
    if entry.plan is not None and partition == DEFAULT_PARTITION:
        tunables.append(Tunable(PARTITION, None, ("save_all", "recompute_all", *_BUDGETS)))
    return tunables


def _chosen(entry: Entry, backend: Backend) -> tuple[dict[ProductShape, str], list[CallShape]]:
    """The products of forward and backward, with their ways, and the library calls that have several forms."""
    options = CompileOptions.current(backend)
    functions = [entry.programs.forward.function]
    if entry.backward is not None:
        functions.append(entry.lowered.expected_backward)
    found = [products_and_calls(function, options) for function in functions]
    calls = dict.fromkeys(call for _, each in found for call in each)
    return {product: way for each, _ in found for product, way in each}, list(calls)


def _calls(calls: Iterable[CallShape], backend: Backend, log: TuningLog) -> Iterator[Tunable]:
    """Those that take longest first, of the ones that have another promising form."""
    times = {call: _recorded(log, FORMS, call, backend.seconds_of_forms)["seconds"] for call in calls}
    ordered = sorted((call for call in times if times[call]), key=lambda call: (-times[call][call.name], str(call)))
    for call in ordered[:_MOST_CALLS]:
        if forms := _promising(call.name, times[call]):
            yield Tunable(CALLS, call, forms)


def _products(found: Mapping[ProductShape, str], backend: Backend, log: TuningLog) -> Iterator[Tunable]:
    """The largest first, of those that have another promising way."""
    ordered = sorted(found, key=lambda product: (-product.multiplications, str(product)))
    for product in ordered[:_MOST_PRODUCTS]:
        record = _recorded(log, WAYS, product, backend.seconds_of_ways, present=found[product])
        if ways := _promising(str(record.get("present")), record["seconds"]):
            yield Tunable(PRODUCTS, product, ways)


def _promising(present: str, seconds: Mapping[str, float]) -> tuple[str, ...]:
    """The fastest, of those that are about as fast as the present one by themselves."""
    limit = _ABOUT_AS_FAST * seconds.get(present, 0.0)
    ways = [way for way in sorted(seconds, key=seconds.__getitem__) if way != present and seconds[way] <= limit]
    return tuple(ways[:_MOST_WAYS])


def _recorded(log: TuningLog, kind: str, shape: Any, measure: Callable[[Any], Any], **told: Any) -> dict[str, Any]:
    """The record of the seconds of a product's ways or of a call's forms: the log's, or a new one, measured now."""
    field, named = _SHAPES[kind], repr(astuple(shape))
    for record in log.records:
        if record.get("kind") == kind and record.get(field) == named and isinstance(record.get("seconds"), dict):
            return record
    return log.append(kind=kind, **{field: named}, **told, seconds=dict(measure(shape)))
