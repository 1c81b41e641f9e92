"""Search: knobs in a fixed order, the timing of two choices → the best choices found; every decision is in the log.

The incumbent begins as the default choices. For each knob in turn, the choices that differ from the incumbent in it are
raced against the incumbent one after the other; a faster one takes its place. When a turn over all knobs has changed
something, they have another turn.

What is tried next, and what is kept, follows from the records of the log alone. So an interrupted search goes on where
it was: pairs of choices that are in the log are not measured again, and the seconds that they took count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bridge.compile import Choices
from bridge.tune.log import TuningLog
from bridge.tune.race import Pairs, is_faster, ratio_of

__all__ = ["FASTER", "GAIN", "Knob", "Outcome", "Search", "Trial"]

TRIAL = "trial"
FASTER, NOT_FASTER = "faster", "not faster"

GAIN = 0.005
"""Part of a step's time that a choice has to gain to be taken."""


@dataclass(frozen=True)
class Knob:
    """One thing that can be chosen.

    Attributes:
        part, name: see :meth:`bridge.compile.Choices.having`.
        values: to be tried, in this order; the default is among the choices without any.
    """

    part: str
    name: Any
    values: tuple

    def choices(self, incumbent: Choices) -> Iterator[Choices]:
        """Those that differ from the incumbent in this knob."""
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


class Track(Protocol):
    """Where choices are raced."""

    def prepare(self, candidates: Sequence[Choices]) -> None:
        """Builds what they are compiled to, at the same time; choices of earlier calls are let go."""

    def __call__(self, incumbent: Choices, candidate: Choices) -> Outcome:
        """Races two."""


@dataclass
class Search:
    """One search; :meth:`run` gives the best choices.

    Attributes:
        knobs: in their order.
        track: races choices that are not in the log.
        log: what was raced, of this run.
        seconds: that all trials may take; no further one begins once they have.
        told: called after each trial.
        spent: seconds of all trials so far, of earlier processes, too.
        trials: so far.
        gains: of the candidates that took the incumbent's place, the ratio of their time to its.
    """

    knobs: Sequence[Knob]
    track: Track
    log: TuningLog
    seconds: float
    told: Callable[[Search, Knob, Trial], None] = lambda search, knob, trial: None
    spent: float = 0.0
    trials: int = 0
    gains: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {
            _key(record["over"], record["choices"]): record
            for record in self.log.records
            if record.get("kind") == TRIAL and _is_whole(record)
        }
        self._over: set[str] = set()

    def run(self) -> Choices:
        """The incumbent in the end."""
        incumbent, moved = Choices(), True
        while moved and self.spent < self.seconds:
            before = incumbent
            for knob in self.knobs:
                incumbent = self._turn(knob, incumbent)
                if self.spent >= self.seconds:
                    break
            moved = incumbent != before
        return incumbent

    def _turn(self, knob: Knob, incumbent: Choices) -> Choices:
        candidates = list(knob.choices(incumbent))
        is_prepared = False
        for place, candidate in enumerate(candidates):
            if candidate == incumbent or self.spent >= self.seconds:
                continue
            key = _key(incumbent.plain(), candidate.plain())
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
            self.told(self, knob, trial)
        return incumbent

    def _measure(self, incumbent: Choices, candidate: Choices) -> dict[str, Any]:
        outcome = self.track(incumbent, candidate)
        over, choices = incumbent.plain(), candidate.plain()
        return self.log.append(
            kind=TRIAL,
            over=over,
            choices=choices,
            pairs=outcome.pairs,
            why=outcome.why,
            seconds=outcome.seconds,
            verdict=outcome.verdict,
        )


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether a record of a race has what one has."""
    try:
        Choices.of_plain(record["over"]), Choices.of_plain(record["choices"])
        _outcome(record)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _outcome(record: dict[str, Any]) -> Outcome:
    return Outcome([(float(a), float(b)) for a, b in record["pairs"]], str(record["why"]), float(record["seconds"]))


def _key(over: dict[str, Any], choices: dict[str, Any]) -> str:
    return json.dumps([over, choices], sort_keys=True)
