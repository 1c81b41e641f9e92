"""Loop detection among rows: the calls of a record -> loops whose steps are proven to be one function of their inputs.

Each row (:class:`~bridge.capture.loops.row_calls.RowCall`) has a kind, and reads and makes values; rows of one kind are
the same operator with the same constants on values of the same layouts. All steps of a loop have rows of the same
kinds, in order, and each value that a row of a step reads has one role in all steps
(:mod:`bridge.capture.loops.proven_loop`). Then the steps are one function of carries, parts and constants. Anything
else is no loop.

Periods: the kinds of rows -> runs of rows that repeat with a period. A run is only a candidate for a proof.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bridge.base.errors import Unsupported
from bridge.base.log import channel
from bridge.base.torch_internals import is_dense
from bridge.capture.loops.proven_loop import (
    FURTHEST,
    Carry,
    Constant,
    Local,
    Producer,
    ProvenLoop,
    Role,
    StepParts,
    step_parts,
)
from bridge.capture.loops.row_calls import NotRolledError, RowCalls
from bridge.capture.observation import Draw, StepMasks
from bridge.capture.rows import Record, values_in

log = channel("dispatch")

LEAST_STEPS = 4
"""Least steps: shorter loops stay unrolled."""

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


def find_loops(rows: RowCalls) -> list[ProvenLoop]:
    """Disjoint loops, in order; tries the longest candidates first."""
    candidates = list(periodic(rows.kinds, LEAST_STEPS)) if len(rows.kinds) else []
    found: list[ProvenLoop] = []
    for _ in range(_MOST_ROUNDS):
        found, failed = _loops_of(rows, candidates)
        if not failed:
            break
        candidates = [run for run in candidates if run not in failed]  # shorter ones may lie where these do
    return found


def _loops_of(rows: RowCalls, candidates: Sequence[PeriodicRun]) -> tuple[list[ProvenLoop], set[PeriodicRun]]:
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
    def __init__(self, rows: RowCalls, earlier: Sequence[ProvenLoop]):
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
        loop = ProvenLoop(start, period, steps)
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
                found = step_parts(parts)
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

    def _role(self, values: Sequence[Any], loop: ProvenLoop) -> Role | None:
        made = [self.rows.made[value] for value in values]
        if made[-1][0] >= loop.start:
            return _made_inside(values, made, loop)
        if all(value == values[0] for value in values):
            return Constant(values[0])
        if any(row >= loop.start for row, _ in made):
            return None
        return self._parts_before(values, made)

    def _parts_before(self, values: Sequence[Any], made: Sequence[Producer]) -> StepParts | None:
        """The role of parts that were taken before the loop, or of an earlier loop's results."""
        parts = [self.rows.part(value) for value in values]
        if None not in parts and (found := step_parts(parts)) is not None:
            return found
        for number, other in enumerate(self.earlier):
            places = [(*divmod(row - other.start, other.period), leaf) for row, leaf in made]
            if all(0 <= step < other.steps for step, *_ in places) and len({place[1:] for place in places}) == 1:
                (begin, row, leaf), step = places[0], places[1][0] - places[0][0]
                regular = all(at == begin + step * index for index, (at, *_) in enumerate(places))
                if step and regular and row not in other.taken:
                    return StepParts((number, row, leaf), 0, begin, step, 1, True)
        return None


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


# Autograd in a loop: a carry → the values from before the loop that it depends on, in any step.


def reached_from(loop: ProvenLoop, calls: RowCalls) -> dict[Carry, list[Role]]:
    """The roles that autograd reaches from each carry after enough steps: constants, parts, carries' first values."""
    direct: dict[Producer, dict[Role, None]] = {}
    for index, roles in enumerate(loop.roles):
        row, found = calls.rows[loop.stop - loop.period + index], {}
        for role in (loop.taken[index],) if roles is None else roles:
            found.update(direct[Producer(role.row, role.leaf)] if isinstance(role, Local) else {role: None})
        for leaf, value in enumerate(row.makes):
            direct[Producer(index, leaf)] = found if calls.forms[value].requires_grad else {}
    reached = {carry: _closed(carry, direct) for carry in loop.carries}
    return {carry: [role for role in roles if _is_followed(role, calls)] for carry, roles in reached.items()}


def _is_followed(role: Role, calls: RowCalls) -> bool:
    """Whether autograd tracks a role's value outside of the loop; ``True`` for another loop's results, which it may."""
    match role:
        case StepParts():
            return isinstance(role.of, tuple) or calls.forms[role.of].requires_grad
        case Carry():
            return calls.forms[role.first].requires_grad
    return calls.forms[role.value].requires_grad


def _closed(carry: Carry, direct: dict[Producer, dict[Role, None]]) -> list[Role]:
    """The roles that a carry is computed from, in this step and earlier ones."""
    found: dict[Role, None] = {}
    waiting: list[Role] = [carry]
    while waiting:
        role = waiting.pop()
        if role in found:
            continue
        found[role] = None
        if isinstance(role, Carry):
            waiting += direct[Producer(role.row, role.leaf)] if role.of is None else [role.of]
    return list(found)


# Dropout masks in loops: eager's draws, call by call → one draw of all steps for each loop. Behind a draw with computed
# parameters, or in a step that has one, each step draws by itself.
#
# A row of the draw holds the masks of one step, in eager's order, and the first step's row is first. A step multiplies
# by its masks as eager's dropout does on the host. On a GPU the draw lists eager's fused dropouts one by one, because
# the memory layout of each tensor decides which element gets which number.


_MASK = "aten.bernoulli_.float"
FUSED = "aten.native_dropout.default"


def dropping(loop: ProvenLoop, calls: RowCalls) -> list[int]:
    """The rows of a step that draw a mask."""
    return [index for index in range(loop.period) if loop.start + index in calls.drawn]


def draws_by_itself(loop: ProvenLoop, calls: RowCalls) -> bool:
    """Whether a step draws from the generator's state, as all draws do from the first one with a computed parameter."""
    return any(draw.is_computed for row, draw in calls.drawn.items() if row < loop.stop)


def draw_of_steps(loop: ProvenLoop, calls: RowCalls) -> Draw | None:
    """The masks of all steps of a loop as one draw; ``None`` if a step draws nothing, or draws by itself."""
    drawn = [calls.drawn[loop.start + index] for index in dropping(loop, calls)]
    if not drawn or draws_by_itself(loop, calls):
        return None
    first, is_fused = drawn[0], drawn[0].op == FUSED
    if not is_fused and any(each.op != _MASK or not is_dense(_like(each)) for each in drawn):
        raise NotRolledError("a draw in a loop that is no mask")
    dtypes = [each.operand and each.operand.dtype if is_fused else each.dtype for each in drawn]
    if len(set(dtypes)) > 1 or len({(each.op, each.kwargs, each.device) for each in drawn}) > 1:
        raise NotRolledError("dropout of several types in a step")
    counts = tuple(math.prod(each.shape) for each in drawn)
    kept = tuple(1 - each.args[0] if is_fused else each.args[0] for each in drawn)
    shape, steps = (loop.steps, sum(counts)), StepMasks(counts, kept, dtypes[0])
    made = replace(first, shape=shape, stride=(shape[1], 1), dtype=torch.bool, steps=steps)
    if not is_fused:
        return made
    if dtypes[0] not in (torch.float32, torch.float64):
        raise NotRolledError("dropout of a half type in a step, which eager rounds once")
    places = dropping(loop, calls)
    rows = [start + place for start in range(loop.start, loop.stop, loop.period) for place in places]
    steps = replace(steps, dropouts=tuple(calls.drawn[row] for row in rows))
    return Draw(_MASK, shape, made.stride, torch.bool, kept[:1], device=first.device, steps=steps)


def _like(draw: Draw) -> torch.Tensor:
    return torch.empty_strided(draw.shape, draw.stride, device="meta")


# Unrolled loops: a record → a refusal of thousands of unrolled steps.
#
# Each operator of a step is captured, lowered and planned by itself, which takes some hundredths of a second. A loop
# differs from a deep network by its weights: every step reads the same ones.


#: The most operators of a graph with unrolled steps: about five minutes of compilation.
MOST_OPERATORS = 1 << 13
#: Number of operators from which a warning is logged: about a minute.
_MANY = MOST_OPERATORS >> 2
_STEPS = 32
"""Number of readers of one parameter from which they count as steps."""
_HINT = "dispatch the cell that a step calls, or write the step so that it is found to repeat (docs/loops.md)"


def unrolled_rows(record: Record, parameters: int, forward: str) -> list[Unsupported]:
    """Refuses a record with unrolled steps and more than :data:`MOST_OPERATORS` rows; warns from a quarter of that.

    Args:
        parameters: the number of parameters, which are the record's first inputs.
        forward: the name for messages.
    """
    count = len(record.rows)
    if count <= _MANY:
        return []
    readers = Counter(number for row in record.rows for number in set(values_in((row.args, row.kwargs))))
    if all(readers[number] < _STEPS for number in range(parameters)):
        return []
    if count <= MOST_OPERATORS:
        words = "%s: a loop of %d operators is compiled step by step, which takes minutes: %s"
        log.warning(words, forward, count, _HINT)
        return []
    reason = f"{count} operators of steps that are not proven to be equal, at most {MOST_OPERATORS} are compiled"
    return [Unsupported("a long loop", forward, reason, _HINT)]
