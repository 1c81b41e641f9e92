"""Folded form of a record: its calls with their loops → plain data in which each loop is one step, whatever its length.

Two records of one forward, on arguments that differ in one size, are the same forward of that size if their folded
forms are equal but for integers, each of which is the same multiple of the size plus the same number in both
(:func:`bridge.capture.loops.lengths.of_any_length`).

Tensors are told by where they come from:

    ("input", number)                                       an input of the run
    ("other", number)                                       numbers written in the code, a tensor from elsewhere
    ("made", call, leaf)                                    by a call outside of the loops
    ("part", tensor, dim, begin, extent, squeezed)          a part of one
    ("last", loop, row, leaf)                               by the last step of a loop
    ("step", loop, row, leaf, step)                         by another step
    ("steps", loop, row, leaf, begin, end)                  by these steps, as one tensor with the steps in front
    ("local", row, leaf), ("carry", n), ("part of", n)      in a step: made in it, made in the step before, its part
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from autodiff.scan.prove import Carry, Constant, Local, StepParts
from bridge.base.torch_internals import aten, is_dense
from bridge.capture.loops.find import CallLoop, Role, alive_rows
from bridge.capture.loops.row_calls import NotRolledError, Producer, RowCall, RowCalls
from bridge.capture.observation import Draw, StepMasks
from bridge.capture.rows import Row, ValueRef

__all__ = ["FUSED", "Folded", "FoldedCall", "FoldedJoin", "FoldedLoop", "RowOrigin", "Source", "dropping", "fold"]

Source = tuple
"""Where a tensor comes from, see above."""


@dataclass(frozen=True)
class RowOrigin:
    """The row that a call was, which makes no difference: its line, its module, its modes."""

    row: Row = field(compare=False)


class FoldedCall(NamedTuple):
    """``op(*args, **kwargs)`` on tensors, from outside of the loops or of a step.

    Attributes:
        gives, through, alone: see :class:`bridge.capture.loops.row_calls.CallKind`.
        part: of what it takes, if it takes a part: dim, begin, extent and whether squeezed.
        into: whether it copies into that part of what it reads first.
        number: the number in the arguments.
        forms: of what it makes; ``compared``: of what it reads first.
        modes: grad mode, and autocast's.
        draw: what it draws.
    """

    op: Any
    args: tuple
    kwargs: dict[str, Any]
    gives: Any
    through: tuple
    alone: bool
    reads: tuple
    part: tuple | None
    into: bool
    number: int | float | None
    forms: tuple
    compared: tuple
    modes: tuple
    draw: Draw | None
    origin: RowOrigin


class FoldedJoin(NamedTuple):
    """``stack`` or ``cat`` along ``dim`` of pieces, each of them adjacent steps of a loop, or one tensor."""

    stacks: bool
    dim: int
    pieces: tuple[Source, ...]
    forms: tuple
    origin: RowOrigin


class FoldedLoop(NamedTuple):
    """A loop.

    Attributes:
        steps: how many.
        carries: of each, row and leaf, where the first one comes from, and the carry that it was in the step before.
        parts: of each where the whole comes from, dim, first, step, extent and squeezed.
        rows: of a step: a call, the number of the part that it takes, or ``None`` where it is dead.
        reached: what autograd reaches from each carry.
        ys: row and leaf of the results of all steps.
        numbers: rows that have a number for each step, with these.
        written: rows that write a part, with where the whole comes from, its form, dim, begin, step, extent, squeezed.
        draw: of the masks of all steps; ``drops``: the rows that drop with them, with the draw of the first step.
    """

    steps: int
    carries: tuple
    parts: tuple
    rows: tuple
    reached: tuple
    ys: tuple
    numbers: tuple
    written: tuple
    draw: Draw | None
    drops: tuple


class Folded(NamedTuple):
    """Calls and loops in order, the results, and the last values of inputs that are written."""

    made: tuple
    results: tuple
    last: tuple


def fold(calls: RowCalls, loops: Sequence[CallLoop]) -> Folded:
    """The folded form of calls with loops. :class:`NotRolledError`: they share memory in ways that it cannot say."""
    return _Fold(calls, loops).form()


class _Fold:
    def __init__(self, calls: RowCalls, loops: Sequence[CallLoop]):
        self.calls, self.loops = calls, loops
        self._called = [alive or row in calls.drawn for row, alive in enumerate(alive_rows(calls))]
        self._loop_of: dict[int, int] = {row: n for n, loop in enumerate(loops) for row in range(loop.start, loop.stop)}
        self._ys = [self._leaving(number) for number in range(len(loops))]
        self.called: dict[int, int] = {}  # calls outside of the loops, by their numbers in the form

    def form(self) -> Folded:
        calls, begins = self.calls, {loop.start: number for number, loop in enumerate(self.loops)}
        made: list[Any] = []
        row = 0
        while row < len(calls.rows):
            if row in begins:
                loop = self.loops[begins[row]]
                made.append(self._loop(loop, begins[row]))
                row = loop.stop
                continue
            call = calls.rows[row]
            if self._called[row] and not (call.makes and calls.part(call.makes[0]) is not None):
                self._shares(row, call)
                made.append(self._join(call) or self._call(row, self._sources(call.reads)))
                self.called[row] = len(made) - 1
            row += 1
        results = [self._source(leaf.number) if type(leaf) is ValueRef else (leaf,) for leaf in calls.results]
        last = tuple((number, self._source(value)) for number, value in calls.last.items())
        return Folded(tuple(made), tuple(results), last)

    def _shares(self, row: int, call: RowCall) -> None:
        """A write outside of the loops: what shares the memory does so in the form, too.

        Of what a loop makes the form has copies; what is taken of one of these afterwards shares its memory.
        """
        through = self.calls.kinds[call.kind].through
        if len(through) < 2:
            return
        rows = [self.calls.made[call.reads[place]].row for place in through]
        looped = [each for each in rows if each in self._loop_of]
        if not looped:
            return
        stop = self.loops[self._loop_of[looped[0]]].stop
        if len(looped) > 1 or any(each < stop for each in rows if each not in looped):
            raise NotRolledError("a write into memory that a loop shares with other tensors")

    def place(self, value: int) -> tuple[int, int, Producer] | None:
        """The loop that makes a value: its number, the step, and which result of the step it is."""
        row, leaf = self.calls.made[value]
        number = self._loop_of.get(row)
        if number is None:
            return None
        step, index = divmod(row - self.loops[number].start, self.loops[number].period)
        return number, step, Producer(index, leaf)

    def _leaving(self, number: int) -> list[Producer]:
        """The results of a step whose values, of some step, are read after the loop."""
        found: dict[Producer, None] = {}
        for other, loop in enumerate(self.loops):
            for parts in loop.parts:
                if isinstance(parts.of, tuple) and parts.of[0] == number:
                    found.setdefault(Producer(*parts.of[1:]))
            if other == number:
                continue
            given = [carry.first for carry in loop.carries]
            given += [role.value for roles in loop.roles for role in roles or () if isinstance(role, Constant)]
            given += [parts.of for parts in loop.parts if isinstance(parts.of, int)]
            given += [written.first for written in loop.written.values()]
            self._note(given, number, found)
        for row, call in enumerate(self.calls.rows):
            if row not in self._loop_of and self._called[row]:
                self._note(call.reads, number, found)
        self._note(list(self.calls.needed), number, found)
        return list(found)

    def _note(self, values: Sequence[int], number: int, found: dict[Producer, None]) -> None:
        for value in values:
            place = self.place(value)
            if place is not None and place[0] == number and not self._is_last(place):
                found.setdefault(place[2])

    def _is_last(self, place: tuple[int, int, Producer]) -> bool:
        """Whether a value of a loop is a carry, or what was written, after the last step."""
        loop = self.loops[place[0]]
        carried = any((carry.row, carry.leaf) == place[2] and carry.of is None for carry in loop.carries)
        return place[1] == loop.steps - 1 and (carried or place[2].row in loop.written)

    def _source(self, value: int) -> Source:
        row, leaf = self.calls.made[value]
        if row < 0:
            return "input" if row == -1 else "other", leaf
        place = self.place(value)
        if place is not None:
            number, step, (index, result) = place
            if not self._is_last(place):
                return "step", number, index, result, step
            return "last", number, index, result
        part = self.calls.part(value)
        if part is not None:
            return "part", self._source(part.of), *part[1:]
        if row not in self.called:
            raise NotRolledError("a draw of what nothing else needs")
        return "made", self.called[row], leaf

    def _sources(self, values: Sequence[int]) -> tuple[Source, ...]:
        return tuple(map(self._source, values))

    def _forms(self, values: Sequence[int]) -> tuple:
        return tuple(tuple(self.calls.forms[value]) for value in values)

    def _call(self, row: int, reads: tuple) -> FoldedCall:
        call = self.calls.rows[row]
        kind = self.calls.kinds[call.kind]
        part = call.part or call.into
        taken = None if part is None else tuple(part[1:])
        modes, draw = (call.row.grad, call.row.autocast), self.calls.drawn.get(row)
        given = (
            kind.op,
            kind.args,
            kind.kwargs,
            kind.gives,
            kind.through,
            kind.alone,
            reads,
            taken,
            call.into is not None,
        )
        compared = self._forms(call.reads[:1])
        return FoldedCall(*given, call.number, self._forms(call.makes), compared, modes, draw, RowOrigin(call.row))

    def _join(self, call: RowCall) -> FoldedJoin | None:
        """A call of ``stack`` or ``cat`` of adjacent steps' results."""
        kind, values = self.calls.kinds[call.kind], call.reads
        if kind.op not in (aten.stack.default, aten.cat.default):
            return None
        groups = list(self._groups(values))
        if len(groups) == len(values) or len({self.calls.forms[value].shape for value in values}) > 1:
            return None
        rank, stacks = len(self.calls.forms[values[0]].shape), kind.op is aten.stack.default
        given = kind.args[1] if len(kind.args) > 1 else kind.kwargs.get("dim", 0)
        dim, pieces = given % (rank + 1 if stacks else rank), tuple(map(self._piece, groups))
        return FoldedJoin(stacks, dim, pieces, self._forms(call.makes), RowOrigin(call.row))

    def _groups(self, values: Sequence[int]) -> list[list[int]]:
        """Values in a row of which each is of the step after (or before) that of the one before."""
        groups: list[list[int]] = []
        places = [self.place(value) for value in values]
        for index, (value, place) in enumerate(zip(values, places, strict=True)):
            before = places[index - 1] if index else None
            adjacent = None not in (place, before) and place[::2] == before[::2] and abs(place[1] - before[1]) == 1
            if adjacent and len(groups[-1]) > 1:
                adjacent = place[1] - before[1] == before[1] - places[index - 2][1]
            if adjacent:
                groups[-1].append(value)
            else:
                groups.append([value])
        return groups

    def _piece(self, values: Sequence[int]) -> Source:
        if len(values) == 1:
            return self._source(values[0])
        number, begin, (index, leaf) = self.place(values[0])
        _, end, _ = self.place(values[-1])
        return "steps", number, index, leaf, begin, end

    def _loop(self, loop: CallLoop, number: int) -> FoldedLoop:
        calls = self.calls
        carries = {carry: place for place, carry in enumerate(loop.carries)}
        parts = {each: place for place, each in enumerate(loop.parts)}

        def role(each: Role) -> tuple:
            match each:
                case Local():
                    return "local", each.row, each.leaf
                case Carry():
                    return "carry", carries[each]
                case StepParts():
                    return "part of", parts[each]
            return self._source(each.value)

        def whole(each: StepParts) -> tuple:
            of = ("of loop", *each.of) if isinstance(each.of, tuple) else self._source(each.of)
            return of, *each[1:]

        def first(carry: Carry) -> tuple:
            before = None if carry.of is None else carries[carry.of]
            return carry.row, carry.leaf, self._source(carry.first), before

        rows: list[Any] = []
        for index, roles in enumerate(loop.roles):
            if index in loop.dead:
                rows.append(None)
            elif roles is None:
                rows.append(parts[loop.taken[index]])
            else:
                call = self._call(loop.start + index, tuple(map(role, roles)))
                last = calls.rows[loop.stop - loop.period + index]
                rows.append(call._replace(forms=self._forms(last.makes), origin=RowOrigin(last.row), draw=None))
        reached = sources_of(loop, calls)
        written = [
            (index, self._source(each.first), tuple(calls.forms[each.first]), *each[1:])
            for index, each in loop.written.items()
        ]
        draw = draw_of_steps(loop, calls)
        drops = tuple((index, calls.drawn[loop.start + index]) for index in dropping(loop, calls))
        return FoldedLoop(
            loop.steps,
            tuple(map(first, carries)),
            tuple(map(whole, parts)),
            tuple(rows),
            tuple(tuple(map(role, reached[carry])) for carry in carries),
            tuple(tuple(each) for each in self._ys[number]),
            tuple(loop.numbers.items()),
            tuple(written),
            draw,
            drops if draw is not None else (),
        )


def sources_of(loop: CallLoop, calls: RowCalls) -> dict[Carry, list[Role]]:
    """What autograd reaches from each carry after enough steps: constants, parts, carries' first values."""
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
    """Whether autograd follows what a role stands for outside of the loop; of another loop's results, it may."""
    match role:
        case StepParts():
            return isinstance(role.of, tuple) or calls.forms[role.of].requires_grad
        case Carry():
            return calls.forms[role.first].requires_grad
    return calls.forms[role.value].requires_grad


def _closed(carry: Carry, direct: dict[Producer, dict[Role, None]]) -> list[Role]:
    """What a carry is made of, in this step and those before."""
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


# Masks of dropout in loops: what eager draws, call by call → one draw of all steps for each loop.
#
# The first step's masks come first, as eager draws them: a row of the draw holds the masks of one step, one behind the
# other. A step multiplies by them as eager's dropout does on the host. On a GPU eager's fused dropouts are told one by
# one: where each tensor lies decides which element gets which number.


_MASK = "aten.bernoulli_.float"
FUSED = "aten.native_dropout.default"


def dropping(loop: CallLoop, calls: RowCalls) -> list[int]:
    """The rows of a step that draw a mask."""
    return [index for index in range(loop.period) if loop.start + index in calls.drawn]


def draw_of_steps(loop: CallLoop, calls: RowCalls) -> Draw | None:
    """What all steps of a loop draw; ``None`` if that is nothing. ``NotRolledError`` if it is not one draw."""
    drawn = [calls.drawn[loop.start + index] for index in dropping(loop, calls)]
    if not drawn:
        return None
    first = drawn[0]
    if first.op == FUSED:
        return _fused_steps(loop, calls, drawn)
    if any(each.op != _MASK or not is_dense(_like(each)) for each in drawn):
        raise NotRolledError("a draw in a loop that is no mask")
    if any((each.args, each.kwargs, each.dtype) != (first.args, first.kwargs, first.dtype) for each in drawn):
        raise NotRolledError("dropout of several rates or types in a step")
    counts = tuple(math.prod(each.shape) for each in drawn)
    shape = loop.steps, sum(counts)
    return replace(first, shape=shape, stride=(shape[1], 1), dtype=torch.bool, steps=StepMasks(counts, first.dtype))


def _fused_steps(loop: CallLoop, calls: RowCalls, drawn: Sequence[Draw]) -> Draw:
    """Likewise, of a GPU's dropouts; ``drawn``: those of the first step."""
    first = drawn[0]
    if len({(each.op, each.args, each.operand and each.operand.dtype, each.device) for each in drawn}) > 1:
        raise NotRolledError("dropout of several rates or types in a step")
    if first.operand.dtype not in (torch.float32, torch.float64):
        raise NotRolledError("dropout of a half type in a step, which eager rounds once")
    places = dropping(loop, calls)
    rows = [start + place for start in range(loop.start, loop.stop, loop.period) for place in places]
    counts = tuple(math.prod(each.shape) for each in drawn)
    shape, masks = (loop.steps, sum(counts)), tuple(calls.drawn[row] for row in rows)
    steps = StepMasks(counts, first.operand.dtype, masks)
    return Draw(_MASK, shape, (shape[1], 1), torch.bool, (1 - first.args[0],), device=first.device, steps=steps)


def _like(draw: Draw) -> torch.Tensor:
    return torch.empty_strided(draw.shape, draw.stride, device="meta")
