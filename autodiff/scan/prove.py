"""Loop detection among rows: abstract rows -> loops whose steps are proven to be one function of their inputs.

The caller defines the rows (:class:`Rows`): bindings of a Relax function (:mod:`autodiff.scan.roll`), or recorded calls
of torch's operators (``bridge.capture.loops.find``). Each row has a kind, and reads and makes values; rows of one kind
are the same operator with the same constants on values of the same layouts. All steps of a loop have rows of the same
kinds, in order, and each value that a row of a step reads is, in all steps,

* *local*: a result of one row of the same step,
* a *carry*: a result of one row of the previous step, or of an earlier step; in the first steps, values from before the
  loop,
* a *constant*: one value from before the loop, or
* a *part* of one value: each step reads equally much further (or before) along one axis, or an earlier loop's result
  equally many steps later; the step itself takes the part, or it was taken before. Parts may overlap or leave gaps.

Then the steps are one function of carries, parts and constants. Anything else is no loop.

Periods: the kinds of rows -> runs of rows that repeat with a period. A run is only a candidate for a proof.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["FURTHEST", "Carry", "Constant", "Local", "Part", "PeriodicRun", "Producer", "ProvenLoop"]
__all__ += ["Rows", "StepParts", "find_loops", "step_parts"]

LEAST_STEPS = 4
"""Least steps: shorter loops stay unrolled."""

FURTHEST = 4
"""The number of steps that a carry may look back."""

_SHIFTS = 64
"""The number of rows by which a loop may begin later than its run, in each of the first two steps."""
_MOST_TIMES = 8
"""The largest step tried, in periods: layers of one size whose rows look alike."""
_MOST_ROUNDS = 20


class PeriodicRun(NamedTuple):
    """Rows ``start`` to ``start + length``; each has the key of the row ``period`` later, if that is in the run."""

    start: int
    period: int
    length: int


def periodic(keys: Sequence[Hashable], least: int) -> Iterator[PeriodicRun]:
    """Runs of at least ``least`` whole periods: longest first, then shortest period first.

    Skips runs inside a longer one whose period divides theirs. Equal ``keys``: rows that look alike.
    """
    known: dict[Hashable, int] = {}
    numbers = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
    found: list[PeriodicRun] = []
    for period in _periods(numbers, least):
        stretches = _stretches(numbers[:-period] == numbers[period:], (least - 1) * period)
        found += [PeriodicRun(start, period, alike + period) for start, alike in stretches]
    found.sort(key=lambda run: (-run.length, run.period))
    taken: list[PeriodicRun] = []
    for run in found:
        if not any(_repeats(run, other) for other in taken):
            taken.append(run)
            yield run


def _periods(keys: np.ndarray, least: int) -> list[int]:
    """Candidate periods: distances between neighbouring equal keys, or between equal words of 2, 4 or 8 keys, that
    occur at least ``least - 1`` times."""
    found: set[int] = set()
    most = len(keys) // least
    words = keys
    for width in (1, 2, 4, 8):
        order = np.argsort(words, kind="stable")
        same = words[order[1:]] == words[order[:-1]]
        gaps, counts = np.unique((order[1:] - order[:-1])[same], return_counts=True)
        found.update(gaps[(counts >= least - 1) & (gaps <= most)].tolist())
        if len(words) <= width:
            break
        pairs = np.stack([words[:-width], words[width:]], axis=1)
        words = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return sorted(found)


def _stretches(alike: np.ndarray, least: int) -> list[tuple[int, int]]:
    """Start and length of each stretch of at least ``least`` true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], alike.view(np.int8), [0]))))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(start, stop - start) for start, stop in pairs if stop - start >= least]


def _repeats(run: PeriodicRun, other: PeriodicRun) -> bool:
    """Whether a run lies within another one whose period divides its own."""
    inside = other.start <= run.start and run.start + run.length <= other.start + other.length
    return inside and run.period % other.period == 0


class Producer(NamedTuple):
    """Definition of a value: result ``leaf`` of a row; a negative row is an input."""

    row: int
    leaf: int


class Local(NamedTuple):
    """The ``leaf``-th result of row ``row`` of the same step."""

    row: int
    leaf: int = 0


class Carry(NamedTuple):
    """Loop-carried value: result ``leaf`` of row ``row`` in the previous step; ``first`` in the first step.

    ``of``: for a value of an earlier step, the carry that it was in the previous step.
    """

    row: int
    leaf: int
    first: Any
    of: Carry | None = None


class Constant(NamedTuple):
    """A value from before the loop, the same for all steps."""

    value: Any


class Part(NamedTuple):
    """``extent`` slices of a value from ``begin`` on, along ``dim``; ``form``: their layout, in the caller's terms."""

    of: Any
    dim: int
    begin: int
    extent: int
    form: Any


class StepParts(NamedTuple):
    """Slices that advance with the steps: the first begin, and the increment per step along the axis (may be negative).

    ``of``: the sliced value, or all steps of an earlier loop's row: ``(loop, row, leaf)``.
    """

    of: Any
    dim: int
    first: int
    step: int
    extent: int
    form: Any

    @property
    def falls(self) -> bool:
        """Whether later parts lie before earlier ones."""
        return self.step < 0


def step_parts(parts: Sequence[Part]) -> StepParts | None:
    """Parts at equal distances, as one object; ``None`` for other parts."""
    first, second = parts[:2]
    step = second.begin - first.begin
    if not step or any(part != first._replace(begin=first.begin + step * index) for index, part in enumerate(parts)):
        return None
    return StepParts(first.of, first.dim, first.begin, step, first.extent, first.form)


@dataclass
class ProvenLoop:
    """A loop: ``steps`` times ``period`` rows from ``start`` on.

    Attributes:
        roles: by row of a step, the roles of its operands, in order; ``None`` for a row that takes a part.
        taken: by row of a step, the parts that it takes.
    """

    start: int
    period: int
    steps: int
    roles: list[list[Any] | None] = field(default_factory=list)
    taken: dict[int, StepParts] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + self.period * self.steps

    def group(self, index: int) -> range:
        """One row of a step, in all steps."""
        return range(self.start + index, self.stop, self.period)

    @property
    def carries(self) -> list[Carry]:
        """The carries, in order of first use, each followed by its ``of`` chain; no duplicates."""
        found: dict[Carry, None] = {}
        for each in self.of_kind(Carry):
            carry: Carry | None = each
            while carry is not None:
                found.setdefault(carry)
                carry = carry.of
        return list(found)

    @property
    def carried(self) -> set[Producer]:
        """The results of a step that are carries of the next one."""
        return {Producer(carry.row, carry.leaf) for carry in self.carries if carry.of is None}

    @property
    def given(self) -> list[Any]:
        """Values from before the loop."""
        values = [carry.first for carry in self.carries] + [role.value for role in self.of_kind(Constant)]
        return values + [parts.of for parts in self.parts if not isinstance(parts.of, tuple)]

    @property
    def parts(self) -> list[StepParts]:
        """The step parts, each once."""
        return list(dict.fromkeys([*self.taken.values(), *self.of_kind(StepParts)]))

    def of_kind(self, kind: type) -> list:
        """The roles of a kind, each once, in order of first use."""
        return list(dict.fromkeys(role for roles in self.roles for role in roles or () if isinstance(role, kind)))


class Rows:
    """The interface through which the proof sees a caller's rows.

    Attributes:
        kinds: by row; equal for rows that do the same, except for the begin of a part that they take.
        reads: by row, the values that it reads.
        taken: by row, the part of a value that it takes, or ``None``.
        made: by value, its origin.
        needed: values that are read after all rows.
    """

    kinds: Sequence[Hashable]
    reads: Sequence[Sequence[Any]]
    taken: Sequence[Part | None]
    made: Mapping[Any, Producer] | Sequence[Producer]
    needed: Iterable[Any]

    def loop(self, start: int, period: int, steps: int) -> ProvenLoop:
        """A loop, without roles yet."""
        return ProvenLoop(start, period, steps)

    def columns(self, loop: ProvenLoop, index: int) -> Sequence[Sequence[Any]] | None:
        """By operand of a row of a step, its values in all steps; ``None`` if no step may contain the row."""
        raise NotImplementedError

    def part(self, value: Any) -> Part | None:
        """The part of another value that a value is; ``None`` if it is none."""
        raise NotImplementedError

    def is_readable(self, parts: StepParts) -> bool:
        """Whether a step can read its part of a value."""
        return True

    def gathered(self, values: Sequence[Any]) -> Any | None:
        """A role for unrelated values from before the loop, one per step; ``None`` if there is none."""
        return None

    def is_own(self, loop: ProvenLoop, index: int, roles: Sequence[Any]) -> bool:
        """Whether a row of a step, with these operand roles, has no effect outside of the step."""
        return True

    def is_whole(self, loop: ProvenLoop) -> bool:
        """Whether a loop with known roles is worth keeping: it has a carry."""
        return bool(loop.carries)


def find_loops(rows: Rows) -> list[ProvenLoop]:
    """Disjoint loops, in order; tries the longest candidates first."""
    candidates = list(periodic(rows.kinds, LEAST_STEPS)) if len(rows.kinds) else []
    found: list[ProvenLoop] = []
    for _ in range(_MOST_ROUNDS):
        found, failed = _loops_of(rows, candidates)
        if not failed:
            break
        candidates = [run for run in candidates if run not in failed]  # shorter ones may lie where these do
    return found


def _loops_of(rows: Rows, candidates: Sequence[PeriodicRun]) -> tuple[list[ProvenLoop], set[PeriodicRun]]:
    """The loops of the longest runs, and the runs that have none."""
    found: list[ProvenLoop] = []
    failed: set[PeriodicRun] = set()
    for run in _disjoint(candidates):
        # in order, so that a loop may read the results of an earlier one
        before = len(found)
        rest: PeriodicRun | None = run
        while rest is not None and (loop := _Finder(rows, found).best(rest)) is not None:
            found.append(loop)
            rest = _behind(rest, loop)
        if len(found) == before:
            failed.add(run)
    return found, failed


def _behind(run: PeriodicRun, loop: ProvenLoop) -> PeriodicRun | None:
    """The rest of a run after a loop: for instance the steps of another layer."""
    length = run.start + run.length - loop.stop
    return PeriodicRun(loop.stop, run.period, length) if length >= LEAST_STEPS * run.period else None


def _disjoint(candidates: Sequence[PeriodicRun]) -> Iterator[PeriodicRun]:
    """Disjoint runs, longest first wins; in order of position."""
    taken: list[PeriodicRun] = []
    for run in sorted(candidates, key=lambda run: (-run.length, run.period)):
        if all(run.start + run.length <= other.start or other.start + other.length <= run.start for other in taken):
            taken.append(run)
    yield from sorted(taken)


class _Finder:
    def __init__(self, rows: Rows, earlier: Sequence[ProvenLoop]):
        self.rows, self.earlier = rows, earlier

    def best(self, run: PeriodicRun) -> ProvenLoop | None:
        """The loop that covers most rows of a run; the shortest step among equals.

        Rows of several layers look alike but read other weights, so a step may be several periods.
        """
        best = None
        for times in range(1, _MOST_TIMES + 1):
            loop = self._of_period(run._replace(period=run.period * times))
            if loop is not None and (best is None or loop.stop - loop.start > best.stop - best.start + loop.period):
                best = loop
            if best is not None and run.length - (best.stop - best.start) < 2 * run.period:
                break
        return best

    def _of_period(self, run: PeriodicRun) -> ProvenLoop | None:
        """The longest loop of a run, with the fewest carries in its first steps; it may begin in the first two
        steps."""
        possible = []
        for shift in _shifts(run):
            steps = (run.length - shift) // run.period
            loop = self._proven(run.start + shift, run.period, LEAST_STEPS) if steps >= LEAST_STEPS else None
            if loop is not None:
                possible.append((-steps, len(loop.carries), shift))
        longest = None
        for steps, _, shift in sorted(possible):
            if longest is not None and longest.steps >= -steps:
                break
            loop = self._longest(run.start + shift, run.period, -steps)
            if longest is None or loop.steps > longest.steps:
                longest = loop
        return longest

    def _longest(self, start: int, period: int, steps: int) -> ProvenLoop:
        """The loop with the most steps, by bisection from a proven loop of :data:`LEAST_STEPS`."""
        if (loop := self._proven(start, period, steps)) is not None:
            return loop
        proven, few, many = self._proven(start, period, LEAST_STEPS), LEAST_STEPS, steps
        while many - few > 1:
            middle = (few + many) // 2
            loop = self._proven(start, period, middle)
            if loop is not None:
                proven, few = loop, middle
            else:
                many = middle
        return proven

    def _proven(self, start: int, period: int, steps: int) -> ProvenLoop | None:
        """The loop with its roles; ``None`` if there is no proof."""
        rows = self.rows
        loop = rows.loop(start, period, steps)
        for index in range(period):
            columns = rows.columns(loop, index)
            if columns is None:
                return None
            roles = []
            for column in columns:
                if (role := self._role(column, loop)) is None:
                    return None
                roles.append(role)
            parts = [rows.taken[row] for row in loop.group(index)]
            if len(set(parts)) > 1:
                found = self._readable(parts)
                if found is not None and all(isinstance(role, Constant) for role in roles):
                    loop.taken[index] = found
                    loop.roles.append(None)
                    continue
                if len({part[1:] for part in parts}) > 1:
                    return None
            if not rows.is_own(loop, index, roles):
                return None
            loop.roles.append(roles)
        return loop if rows.is_whole(loop) else None

    def _role(self, values: Sequence[Any], loop: ProvenLoop) -> Any | None:
        made = [self.rows.made[value] for value in values]
        if made[-1][0] >= loop.start:
            return _made_inside(values, made, loop)
        if all(value == values[0] for value in values):
            return Constant(values[0])
        if any(row >= loop.start for row, _ in made):
            return None
        return self._parts_before(values, made) or self.rows.gathered(values)

    def _parts_before(self, values: Sequence[Any], made: Sequence[Producer]) -> StepParts | None:
        """The role of parts that were taken before the loop, or of an earlier loop's results."""
        parts = [self.rows.part(value) for value in values]
        if None not in parts and (found := self._readable(parts)) is not None:
            return found
        for number, other in enumerate(self.earlier):
            places = [(*divmod(row - other.start, other.period), leaf) for row, leaf in made]
            if all(0 <= step < other.steps for step, *_ in places) and len({place[1:] for place in places}) == 1:
                (begin, row, leaf), step = places[0], places[1][0] - places[0][0]
                regular = all(at == begin + step * index for index, (at, *_) in enumerate(places))
                parts = StepParts((number, row, leaf), 0, begin, step, 1, True)
                if step and regular and row not in other.taken and self.rows.is_readable(parts):
                    return parts
        return None

    def _readable(self, parts: Sequence[Part]) -> StepParts | None:
        found = step_parts(parts)
        return found if found is not None and self.rows.is_readable(found) else None


def _made_inside(values: Sequence[Any], made: Sequence[Producer], loop: ProvenLoop) -> Local | Carry | None:
    """The role of values, one per step, of which the loop makes the last; ``None`` if there is none."""
    start, period = loop.start, loop.period
    back = next((step for step, (row, _) in enumerate(made) if row >= start), FURTHEST + 1)
    if back > FURTHEST:
        return None
    row, leaf = made[back]
    if row >= start + period or any(each != (row + at * period, leaf) for at, each in enumerate(made[back:])):
        return None
    role: Carry | None = None
    for value in reversed(values[:back]):
        role = Carry(row - start, leaf, value, role)
    return role or Local(row - start, leaf)


def _shifts(run: PeriodicRun) -> Iterator[int]:
    """Offsets at which a loop may begin in a run: anywhere in the first two steps, as far as there is room."""
    spare = min(run.length % run.period + 1, _SHIFTS)
    yield from (*range(spare), *range(run.period, run.period + spare))
