"""Loops among recorded calls: rows -> loops whose steps are proven to be the same function of what they are given.

All steps of a loop have rows of the same kinds: the same functions, with the same constants, on tensors of the same
layouts. Each value that a row of a step reads is, in all steps,

* *local*: what the same row of the same step has made,
* a *carry*: what the same row of the step before has made, or of one further back,
* a *constant*: one value from before the loop, or
* a *part* of one: in each step as much further (or before) along one axis, or what an earlier loop made so many steps
  later; whether the step takes it or it was taken before. Parts may overlap or leave gaps, or
* *written* part by part, if it is what the same row of the step before has written: each step writes the next part.

The number of a row may differ from step to step: the numbers of all steps are a sequence. Then the steps are one
function of carries, parts, numbers and constants. Anything else is no loop. In the first steps autograd
may not follow yet what it follows in all later ones: the initial state requires no grad. It is the same function there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from autodiff.scan import PeriodicRun, periodic
from autodiff.scan.prove import FURTHEST, Carry, Constant, Local, ProvenLoop, made_inside, shifts
from bridge.capture.loops.row_calls import NotRolledError, Part, RowCall, RowCalls

__all__ = ["CallLoop", "Role", "StepParts", "Written", "alive_rows", "evenly_alive", "find_loops"]

LEAST_STEPS = 6
"""Shorter loops are traced as they are."""
_SHIFTS = 64
_MOST_TIMES = 8
"""Layers of one size that a step may go through."""
_MOST_ROUNDS = 20


class StepParts(NamedTuple):
    """A part for each step: the first one, and how much further each next one begins along its axis (negative: how much
    before). ``of`` a value, or of what an earlier loop's row makes in all of its steps."""

    of: int | tuple[int, int, int]
    dim: int
    first: int
    step: int
    extent: int
    squeezed: bool


class Written(NamedTuple):
    """A value, ``first`` before the loop, of which each step writes a part; as :class:`StepParts`."""

    first: int
    dim: int
    begin: int
    step: int
    extent: int
    squeezed: bool


Role = Local | Carry | Constant | StepParts


@dataclass
class CallLoop(ProvenLoop):
    """A proven loop.

    Attributes:
        written: what rows write; they have the role of the part's new value.
        numbers: of rows that have another number in some step, those of all steps.
        dead: rows that are not called; they read nothing.
    """

    written: dict[int, Written] = field(default_factory=dict)
    numbers: dict[int, tuple[int | float, ...]] = field(default_factory=dict)
    dead: frozenset[int] = frozenset()

    @property
    def parts(self) -> list[StepParts]:
        """Each once."""
        return list(dict.fromkeys([*self.taken.values(), *self.of_kind(StepParts)]))


def find_loops(calls: RowCalls) -> list[CallLoop]:
    """Loops that do not overlap, in order; the longest are looked for first."""
    candidates = list(periodic([row.kind for row in calls.rows], LEAST_STEPS)) if calls.rows else []
    readers = Counter(value for row in calls.rows for value in row.reads)
    readers.update(calls.needed)
    for _ in range(_MOST_ROUNDS):
        found, failed = _loops_of(calls, candidates, readers)
        if not failed:
            break
        candidates = [run for run in candidates if run not in failed]  # shorter ones may lie where these do
    return found


def _loops_of(
    calls: RowCalls, candidates: Sequence[PeriodicRun], readers: Counter[int]
) -> tuple[list[CallLoop], set[PeriodicRun]]:
    """The loops of the longest runs, and the runs that have none."""
    found: list[CallLoop] = []
    failed: set[PeriodicRun] = set()
    for run in _disjoint(candidates):
        # in order, so that a loop may read what an earlier one makes
        before = len(found)
        rest: PeriodicRun | None = run
        while rest is not None and (loop := _Finder(calls, found, readers).best(rest)) is not None:
            found.append(loop)
            rest = _behind(rest, loop)
        if len(found) == before:
            failed.add(run)
    return found, failed


def _behind(run: PeriodicRun, loop: CallLoop) -> PeriodicRun | None:
    """What is left of a run behind a loop, as the steps of another layer are."""
    length = run.start + run.length - loop.stop
    return PeriodicRun(loop.stop, run.period, length) if length >= LEAST_STEPS * run.period else None


def _disjoint(candidates: Sequence[PeriodicRun]) -> Iterator[PeriodicRun]:
    """The longest runs, of those that overlap one; in order."""
    taken: list[PeriodicRun] = []
    for run in sorted(candidates, key=lambda run: (-run.length, run.period)):
        if all(run.start + run.length <= other.start or other.start + other.length <= run.start for other in taken):
            taken.append(run)
    yield from sorted(taken)


class _Finder:
    def __init__(self, calls: RowCalls, earlier: Sequence[CallLoop], readers: Counter[int]):
        self.calls, self.earlier, self.readers = calls, earlier, readers

    def best(self, run: PeriodicRun) -> CallLoop | None:
        """The loop that most rows of a run are in; of equal ones that of the shortest step.

        Rows of several layers look alike, too, and read other weights: a step may be several periods.
        """
        best = None
        for times in range(1, _MOST_TIMES + 1):
            loop = self._of_period(run._replace(period=run.period * times))
            if loop is not None and (best is None or loop.stop - loop.start > best.stop - best.start + loop.period):
                best = loop
            if best is not None and run.length - (best.stop - best.start) < 2 * run.period:
                break
        return best

    def _of_period(self, run: PeriodicRun) -> CallLoop | None:
        """The longest loop of a run, with the fewest carries, as its first steps say; it may begin in the first two
        steps."""
        possible = []
        for shift in shifts(run, _SHIFTS):
            steps = (run.length - shift) // run.period
            loop = self._proven(run.start + shift, run.period, LEAST_STEPS) if steps >= LEAST_STEPS else None
            if loop is not None and loop.carries:
                possible.append((-steps, len(loop.carries), shift))
        longest = None
        for steps, _, shift in sorted(possible):
            if longest is not None and longest.steps >= -steps:
                break
            loop = self._longest(run.start + shift, run.period, -steps)
            if longest is None or loop.steps > longest.steps:
                longest = loop
        return longest

    def _longest(self, start: int, period: int, steps: int) -> CallLoop:
        """The loop of the most steps; one of :data:`LEAST_STEPS` is proven."""
        if (loop := self._proven(start, period, steps)) is not None and loop.carries:
            return loop
        proven, few, many = self._proven(start, period, LEAST_STEPS), LEAST_STEPS, steps
        while many - few > 1:
            middle = (few + many) // 2
            loop = self._proven(start, period, middle)
            if loop is not None and loop.carries:
                proven, few = loop, middle
            else:
                many = middle
        return proven

    def _proven(self, start: int, period: int, steps: int) -> CallLoop | None:
        rows = self.calls.rows
        loop = CallLoop(start, period, steps)
        for index in range(period):
            if not self._draws_alike(range(start + index, loop.stop, period)):
                return None
            group = rows[start + index : loop.stop : period]
            if len({repr(each.number) for each in group}) > 1:
                loop.numbers[index] = tuple(each.number for each in group)
            if group[0].into is not None:
                written, role = self._written(group, loop), self._role([each.reads[1] for each in group], loop)
                if written is None or role is None:
                    return None
                loop.written[index] = written
                loop.roles.append([role])
                continue
            roles = []
            for column in zip(*(each.reads for each in group), strict=True):
                role = self._role(column, loop)
                if role is None:
                    return None
                roles.append(role)
            if len({each.part for each in group}) > 1:
                parts = self._parts([each.part for each in group])
                if parts is not None and all(isinstance(role, Constant) for role in roles):
                    loop.taken[index] = parts
                    loop.roles.append(None)
                    continue
                if len({each.part[1:] for each in group}) > 1:
                    return None
            if not self._writes_own(group[0], roles, loop):
                return None
            loop.roles.append(roles)
        return loop if all(self._is_followed_alike(loop, index) for index in range(period)) else None

    def _draws_alike(self, numbers: Sequence[int]) -> bool:
        """Whether rows draw nothing, or masks of one form for dropout."""
        found = {self.calls.drawn.get(number) for number in numbers if self.calls.drawn}
        drops = self.calls.kinds[self.calls.rows[numbers[0]].kind].name == "dropout"
        return not found - {None} or (len(found) == 1 and drops)

    def _writes_own(self, call: RowCall, roles: Sequence[Role], loop: CallLoop) -> bool:
        """Whether a row of a step writes nothing, or memory that was made in the step or is carried, and that is shared
        by what was made in the step alone."""
        kind = self.calls.kinds[call.kind]
        for place, of in enumerate(kind.through):
            role = roles[of]
            own = isinstance(role, Local) and role.row not in loop.taken
            if not own and not (isinstance(role, Carry) and place < kind.targets):
                return False
        return True

    def _written(self, group: Sequence[RowCall], loop: CallLoop) -> Written | None:
        """What rows write, each into what the one before has made, which nothing else reads."""
        first = group[0].reads[0]
        if self.calls.made[first].row >= loop.start:
            return None
        if any(later.reads[0] != before.makes[0] for before, later in pairwise(group)):
            return None
        if any(self.readers[each.makes[0]] > 1 for each in group[:-1]):
            return None
        parts = self._parts([each.into._replace(of=first) for each in group])
        return None if parts is None or abs(parts.step) != parts.extent else Written(*parts)

    def _is_followed_alike(self, loop: CallLoop, index: int) -> bool:
        """Whether autograd follows what a row makes in all steps or in none, up to the first ones."""
        forms, group = self.calls.forms, self.calls.rows[loop.start + index : loop.stop : loop.period]
        last = [forms[value].requires_grad for value in group[-1].makes]
        if any(forms[value].requires_grad > now for each in group for value, now in zip(each.makes, last, strict=True)):
            return False
        return all([forms[value].requires_grad for value in each.makes] == last for each in group[FURTHEST:])

    def _role(self, values: Sequence[int], loop: CallLoop) -> Role | None:
        made, first = self.calls.made, values[0]
        if made[values[-1]].row < loop.start:
            if values.count(first) == len(values):
                return Constant(first)
            return self._parts_before(values, loop)
        return made_inside(values, made.__getitem__, loop.start, loop.period)

    def _parts_before(self, values: Sequence[int], loop: CallLoop) -> StepParts | None:
        """Parts that were taken before the loop, or that an earlier loop has made."""
        made, forms = self.calls.made, self.calls.forms
        if any(made[value].row >= loop.start for value in values) or len({forms[value].layout for value in values}) > 1:
            return None
        parts = [self.calls.part(value) for value in values]
        if None not in parts and (found := self._parts(parts)) is not None:
            return found
        for number, other in enumerate(self.earlier):
            places = [divmod(made[value].row - other.start, other.period) for value in values]
            if all(0 <= step < other.steps for step, _ in places) and len({row for _, row in places}) == 1:
                leaves = {made[value].leaf for value in values}
                begin, step = places[0][0], places[1][0] - places[0][0]
                regular = all(at == begin + step * index for index, (at, _) in enumerate(places))
                if len(leaves) == 1 and step and regular and places[0][1] not in other.taken:
                    return StepParts((number, places[0][1], leaves.pop()), 0, begin, step, 1, True)
        return None

    def _parts(self, parts: Sequence[Part]) -> StepParts | None:
        first, second = parts[0], parts[1]
        step = second.begin - first.begin
        if not step or first[:2] + first[3:] != second[:2] + second[3:]:
            return None
        if any(part != first._replace(begin=first.begin + step * index) for index, part in enumerate(parts)):
            return None
        return StepParts(first.of, first.dim, first.begin, step, first.extent, first.squeezed)


# Live rows: recorded calls and their loops -> loops of whose rows each is needed in all steps, or in none.
#
# What nobody reads has no gradient in eager. In a loop it would have the gradient zero in the steps in which nobody
# reads it, and zero times an infinite factor is not a number. So the last steps, in which fewer rows are needed (a
# state that no step comes after), are no part of the loop, and rows that are needed in no step are not called.


def evenly_alive(calls: RowCalls, loops: Sequence[CallLoop]) -> list[CallLoop]:
    """The loops, some without their last steps.

    ``NotRolledError`` if rows are needed in other steps than the first ones, or if steps that would be left out are
    read by another loop.
    """
    alive = alive_rows(calls)
    return [_even(loop, number, loops, alive) for number, loop in enumerate(loops)]


def alive_rows(calls: RowCalls) -> list[bool]:
    """Of each row, whether the results need it."""
    needed = calls.needed
    alive = [False] * len(calls.rows)
    for number in range(len(calls.rows) - 1, -1, -1):
        row = calls.rows[number]
        if number in calls.effects or not needed.isdisjoint(row.makes):
            alive[number] = True
            needed.update(row.reads)
    return alive


def _even(loop: CallLoop, number: int, loops: Sequence[CallLoop], alive: Sequence[bool]) -> CallLoop:
    period = loop.period
    steps = [tuple(alive[begin : begin + period]) for begin in range(loop.start, loop.stop, period)]
    count = next((count for count, each in enumerate(steps) if each != steps[0]), len(steps))
    if count == len(steps):
        return _without_dead(loop, steps[0])
    read = any(isinstance(parts.of, tuple) and parts.of[0] == number for each in loops for parts in each.parts)
    if count < LEAST_STEPS or read:
        raise NotRolledError(f"what the results need of a step differs after step {count} of {len(steps)}")
    numbers = {row: numbers[:count] for row, numbers in loop.numbers.items()}
    return _without_dead(replace(loop, steps=count, numbers=numbers), steps[0])


def _without_dead(loop: CallLoop, alive: Sequence[bool]) -> CallLoop:
    """The loop without the rows that the results need in no step, and without what these alone read."""
    if all(alive):
        return loop
    of_alive = [{row: each for row, each in given.items() if alive[row]} for given in (loop.taken, loop.written)]
    numbers = {row: each for row, each in loop.numbers.items() if alive[row]}
    roles = [each if alive[row] else [] for row, each in enumerate(loop.roles)]
    dead = frozenset(row for row, is_alive in enumerate(alive) if not is_alive)
    left = replace(loop, roles=roles, taken=of_alive[0], written=of_alive[1], numbers=numbers, dead=dead)
    if any(alive) and not left.carries:
        raise NotRolledError("what the results need of a step does not depend on the step before")
    return left
