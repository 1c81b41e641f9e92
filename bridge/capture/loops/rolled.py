"""Loops rolled up: the record of a run → a record with one step of each loop in the place of all its steps.

All steps are proven to be equal (:mod:`bridge.capture.loops.find`). What a step is given and gives is marked
(:mod:`bridge.capture.loops.operators`); what is read of a loop afterwards is read from the last carries, or from
tensors with the steps in front. On tensors of the layouts that were recorded the new rows compute what the old ones
did, with the meaning that the marks have. They are few, so that what comes after takes about as long for 1,000 steps as
for 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from autodiff.scan.prove import Carry, Constant, Local, StepParts
from bridge.base.log import channel
from bridge.base.torch_internals import OpOverload, aten, schema
from bridge.capture.loops.find import (
    FUSED,
    CallLoop,
    Written,
    draw_of_steps,
    dropping,
    find_loops,
    reached_from,
)
from bridge.capture.loops.made_rows import MadeRows
from bridge.capture.loops.operators import FIRST, LAST, PART, STEPS
from bridge.capture.loops.row_calls import (
    COMPARING,
    CREATING,
    CallKind,
    NotRolledError,
    Producer,
    RowCall,
    RowCalls,
    calls_of,
    filled,
)
from bridge.capture.observation import Draw
from bridge.capture.opened import casts_first
from bridge.capture.rows import Record, Row, ValueLayout, ValueRef, values_in

__all__ = ["LEAST_ROWS", "Rolled", "rolled_up"]

log = channel("dispatch")

LEAST_ROWS = 100
"""A record of fewer rows stays as it is."""

_WITH_TENSOR = {op: op.overloadpacket.Tensor for op in (*COMPARING, aten.rsub.Scalar)}
"""Of operators with a number, those that take a tensor in its place; others take either."""

_META = torch.device("meta")


@dataclass
class Rolled:
    """A record with loops rolled up.

    Attributes:
        record: its rows; values that they make come behind all of the record that it is of.
        results: what it returns, values for tensors.
        draws: what it draws, in order.
        writes: whether a row writes in place, and not what it could return as well.
        same_steps: whether all steps are the same but for carries and parts, and write into no part of a tensor.
        sets: whether it writes inputs.
    """

    record: Record
    results: list[Any] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    writes: bool = False
    same_steps: bool = True
    sets: bool = False


def rolled_up(record: Record, results: Sequence[Any], draws: Sequence[Draw]) -> Rolled | None:
    """A record with its loops rolled up, ``None`` if it has none, or most of its rows are in none.

    Args:
        results: what the run returned, values for tensors.
        draws: what it drew.
    """
    if len(record.rows) < LEAST_ROWS:
        return None
    try:
        record = casts_first(record)
        calls = calls_of(record, results, draws)
        loops = find_loops(calls)
        left_out = sum(loop.period * (loop.steps - 1) for loop in loops)
        if 2 * left_out < len(calls.rows) or not loops:
            return None
        return _Roller(record, calls, loops).rolled
    except NotRolledError as error:
        log.debug("loops are left as they are: %s", error)
        return None


@dataclass
class _Looped:
    """What is known of a loop whose rows are made: its last carries, and its results of all steps."""

    steps: int
    reverse: bool
    last: dict[Producer, ValueRef] = field(default_factory=dict)
    whole: dict[Producer, ValueRef] = field(default_factory=dict)

    def position(self, step: int) -> int:
        """Where a step lies in its tensors."""
        return self.steps - 1 - step if self.reverse else step


class _Roller:
    """The rows of a record's calls, of which some are loops."""

    def __init__(self, record: Record, calls: RowCalls, loops: Sequence[CallLoop]):
        self.calls, self.loops, self.rows, self.call = calls, loops, (rows := MadeRows(record)), rows.call
        self.rolled = Rolled(rows.record, sets=bool(calls.last))
        self._loop_of = {row: number for number, loop in enumerate(loops) for row in range(loop.start, loop.stop)}
        self._others = [row for row in range(len(calls.rows)) if row not in self._loop_of]
        self._made = {value: ValueRef(leaf) for value, (row, leaf) in enumerate(calls.made) if row < 0}
        self._looped: list[_Looped] = []
        outside = iter([*self._others, len(calls.rows)])
        row = next(outside)
        for number, loop in enumerate([*loops, None]):
            while row < (len(calls.rows) if loop is None else loop.start):
                self._outside(row)
                row = next(outside)
            if loop is not None:
                self._looped.append(self._loop(number, loop))
        self.rolled.draws = rows.draws
        self.rolled.results = [self._value(each.number) if type(each) is ValueRef else each for each in calls.results]

    # Values of the record

    def _value(self, value: int) -> ValueRef:
        """What stands for a value of the calls; a part, or one of a step, is taken where it is first read."""
        if value not in self._made:
            self._made[value] = self._taken(value)
        return self._made[value]

    def _taken(self, value: int) -> ValueRef:
        if (place := self._place(value)) is not None:
            number, step, producer = place
            loop = self._looped[number]
            if self._is_last(place):
                return loop.last[producer]
            part = self.call(aten.select.int, loop.whole[producer], 0, loop.position(step))
            return self.call(aten.clone.default, part)
        part = self.calls.part(value)
        return self.rows.part(self._value(part.of), *part[1:])

    def _place(self, value: int) -> tuple[int, int, Producer] | None:
        """The loop that makes a value: its number, the step, and which result of the step it is."""
        row, leaf = self.calls.made[value]
        number = self._loop_of.get(row)
        if number is None:
            return None
        step, index = divmod(row - self.loops[number].start, self.loops[number].period)
        return number, step, Producer(index, leaf)

    def _is_last(self, place: tuple[int, int, Producer]) -> bool:
        """Whether a value of a loop is a carry, or what was written, after the last step."""
        loop = self.loops[place[0]]
        carried = any((carry.row, carry.leaf) == place[2] and carry.of is None for carry in loop.carries)
        return place[1] == loop.steps - 1 and (carried or place[2].row in loop.written)

    def _leaving(self, number: int) -> list[Producer]:
        """The results of a step whose values, of some step, are read after the loop."""
        found: dict[Producer, None] = {}
        values: list[int] = []
        for other, loop in enumerate(self.loops):
            of_loops = [parts.of for parts in loop.parts if isinstance(parts.of, tuple)]
            found.update((Producer(row, leaf), None) for of, row, leaf in of_loops if of == number)
            if other != number:
                values += [carry.first for carry in loop.carries]
                values += [role.value for role in loop.of_kind(Constant)]
                values += [parts.of for parts in loop.parts if not isinstance(parts.of, tuple)]
                values += [written.first for written in loop.written.values()]
        values += [value for row in self._others for value in self.calls.rows[row].reads]
        for place in map(self._place, (*values, *self.calls.needed)):
            if place is not None and place[0] == number and not self._is_last(place):
                found.setdefault(place[2])
        return list(found)

    # Calls

    def _outside(self, row: int) -> None:
        """Adds a call that is in no loop; a part is taken where it is read."""
        call = self.calls.rows[row]
        if not call.makes and row in self.calls.drawn:
            raise NotRolledError("a draw of what nothing else needs")
        if call.makes and self.calls.part(call.makes[0]) is not None:
            return
        self.rows.like = call.row
        self._check_memory(row, call)
        joined = self._joined(call)
        if joined is not None:
            made = [joined]
        else:
            read = [self._value(value) for value in call.reads]
            made = self._call(call, read, call, draw=self.calls.drawn.get(row))
        self._made.update(zip(call.makes, made, strict=True))

    def _check_memory(self, row: int, call: RowCall) -> None:
        """A write outside of the loops: what shares the memory does so in what is made, too.

        Of what a loop makes there are copies; what is taken of one of these afterwards shares its memory.
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

    def _call(
        self,
        call: RowCall,
        read: Sequence[ValueRef],
        like: RowCall,
        number: ValueRef | None = None,
        draw: Draw | None = None,
    ) -> list[ValueRef]:
        """Adds a call, and returns the values that it makes; ``like``: that of the last step, whose results it has;
        ``number``: in the place of its own."""
        self.rows.like = like.row
        if call.into is not None:
            view = self.rows.part(read[0], *call.into[1:])
            self.rows.add(aten.copy_.default, (view, read[1]), {}, view)
            self.rolled.writes = True
            return [read[0]]
        if call.part is not None:
            return [self.rows.part(read[0], *call.part[1:])]
        layouts = [self.calls.forms[value] for value in like.makes]
        kind = _out_of_place(self.calls.kinds[call.kind], layouts)
        self.rolled.writes |= isinstance(kind.op, OpOverload) and schema(kind.op).is_mutable
        layouts = layouts[: len(layouts) - len(kind.through)]
        if number is not None and kind.op in CREATING:
            return [self.rows.contiguous(self.call(aten.expand.default, number, list(layouts[0].shape)))]
        op = kind.op if number is None else _WITH_TENSOR.get(kind.op, kind.op)
        given = iter(read)
        args, kwargs = filled((kind.args, kind.kwargs), given, call.number if number is None else number)
        made = [self.rows.of_layout(*each) for each in zip_longest(layouts, self._bases(like.row, read, len(layouts)))]
        self.rows.add(op, args, kwargs, _given(kind.gives, made, read), draw)
        return [*made, *(read[place] for place in kind.through)]

    def _bases(self, row: Row, read: Sequence[ValueRef], count: int) -> list[ValueRef | None]:
        """For each new value of a row of the record, which of those that stand for its operands shares its memory."""
        memory, operands = self.rows.record.memory, list(values_in((row.args, row.kwargs)))
        of = dict(zip((memory[number] for number in operands), read, strict=False))
        fresh = [each for each in dict.fromkeys(values_in(row.results)) if each not in operands]
        return [of.get(memory[each]) for each in fresh[:count]]

    def _joined(self, call: RowCall) -> ValueRef | None:
        """A call of ``stack`` or ``cat`` of adjacent steps' results reads them as one tensor; ``None`` of others."""
        kind, values = self.calls.kinds[call.kind], call.reads
        if kind.op not in (aten.stack.default, aten.cat.default):
            return None
        groups = list(self._groups(values))
        if len(groups) == len(values) or len({self.calls.forms[value].shape for value in values}) > 1:
            return None
        rank, stacks = len(self.calls.forms[values[0]].shape), kind.op is aten.stack.default
        given = kind.args[1] if len(kind.args) > 1 else kind.kwargs.get("dim", 0)
        dim = given % (rank + 1 if stacks else rank)
        pieces = [self._piece(group, dim, stacks) for group in groups]
        return self.call(aten.cat.default, pieces, dim) if len(pieces) > 1 else self.rows.contiguous(pieces[0])

    def _groups(self, values: Sequence[int]) -> list[list[int]]:
        """Values in a row of which each is of the step after (or before) that of the one before."""
        groups: list[list[int]] = []
        places = [self._place(value) for value in values]
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

    def _piece(self, values: Sequence[int], dim: int, stacks: bool) -> ValueRef:
        """Adjacent steps' results, or one value, as they are joined along ``dim``."""
        if len(values) == 1:
            piece = self._value(values[0])
            return self.call(aten.unsqueeze.default, piece, dim) if stacks else piece
        (number, first, producer), (_, last, _) = self._place(values[0]), self._place(values[-1])
        loop = self._looped[number]
        begin, end = loop.position(first), loop.position(last)
        whole = self.rows.narrowed(loop.whole[producer], 0, min(begin, end), abs(end - begin) + 1)
        steps = self.rows.moved(self.rows.flipped(whole) if end < begin else whole, dim)
        return steps if stacks else self.call(aten.flatten.using_ints, steps, dim, dim + 1)

    # Loops

    def _loop(self, number: int, loop: CallLoop) -> _Looped:
        """Adds one step, with marks around it."""
        calls, period, steps = self.calls, loop.period, loop.steps
        self.rows.like = calls.rows[loop.stop - period].row
        self.rolled.same_steps &= not (loop.numbers or loop.written or dropping(loop, calls))
        known = _Looped(steps, bool(loop.parts) and all(map(self._falls, loop.parts)))
        whole = {parts: self._in_front(parts, steps, known.reverse) for parts in loop.parts}
        firsts = [self._value(carry.first) for carry in loop.carries]
        constants = {role: self._value(role.value) for role in loop.of_kind(Constant)}
        numbers = {index: self._numbers(loop, index, each, known.reverse) for index, each in loop.numbers.items()}
        masks = self._masks(loop, known.reverse)
        given = [*whole.values(), *numbers.values(), *masks]
        parts = [self.call(PART, each, number, place) for place, each in enumerate(given)]
        first_of = dict(zip(loop.carries, firsts, strict=True))
        before: dict[Carry, ValueRef] = {}
        for place, (carry, roles) in enumerate(reached_from(loop, calls).items()):
            reached = [{**whole, **first_of, **constants}[role] for role in roles]
            before[carry] = self.call(FIRST, first_of[carry], reached, number, place, steps, known.reverse)
        made: dict[tuple[int, int], ValueRef] = {}
        given = {**dict(zip(whole, parts, strict=False)), **before, **constants}
        number_of = dict(zip(numbers, parts[len(whole) :], strict=False))
        mask_of = self._mask_of(loop, parts[len(parts) - len(masks) :])
        for index, roles in enumerate(loop.roles):
            if roles is None:
                made[index, 0] = given[loop.taken[index]]
                continue
            call, last = calls.rows[loop.start + index], calls.rows[loop.stop - period + index]
            if not call.makes:  # it draws alone
                continue
            read = [made[role] if isinstance(role, Local) else given[role] for role in roles]
            if index in loop.written:
                results = read
                self.rolled.writes = True
            elif index in mask_of:
                self.rows.like = last.row
                results = [self._dropped(read[0], mask_of[index], calls.drawn[loop.start + index])]
            else:
                results = self._call(call, read, last, number_of.get(index))
            made.update(((index, leaf), each) for leaf, each in enumerate(results))
        for place, carry in enumerate(loop.carries):
            after = made[carry.row, carry.leaf] if carry.of is None else before[carry.of]
            last = self.call(LAST, after, number, place)
            if carry.of is None:
                known.last.setdefault(Producer(carry.row, carry.leaf), last)
        leaving = self._leaving(number)
        for place, y in enumerate(leaving):
            known.whole[y] = self.call(STEPS, made[y], number, place, steps)
        for place, (index, written) in enumerate(loop.written.items(), start=len(leaving)):
            values = self.call(STEPS, made[index, 0], number, place, steps)
            known.last[Producer(index, 0)] = self._written(written, values, known.reverse)
        return known

    def _numbers(self, loop: CallLoop, index: int, numbers: Sequence[Any], reverse: bool) -> ValueRef:
        """The numbers of a row in all steps."""
        call, last = self.calls.rows[loop.start + index], self.calls.rows[loop.stop - loop.period + index]
        compares = self.calls.kinds[call.kind].op in COMPARING
        form = self.calls.forms[call.reads[0] if compares else last.makes[0]]
        return self.rows.literal(
            torch.tensor(numbers[::-1] if reverse else numbers, dtype=form.dtype, device=form.device)
        )

    def _masks(self, loop: CallLoop, reverse: bool) -> list[ValueRef]:
        """The masks that a loop draws, one row for each step; drawn for all steps at once."""
        draw = draw_of_steps(loop, self.calls)
        if draw is None:
            return []
        whole = self.rows.of_layout(ValueLayout(draw.shape, draw.stride, torch.bool, draw.device, False), None)
        self.rows.add(
            aten.empty.memory_format, (list(draw.shape),), {"dtype": torch.bool, "device": draw.device}, whole
        )
        self.rows.add(aten.bernoulli_.float, (whole, *draw.args), {}, whole, draw)
        if not loop.carries:
            return []
        return [self.rows.flipped(whole) if reverse else whole]

    def _mask_of(self, loop: CallLoop, steps: Sequence[ValueRef]) -> dict[int, ValueRef]:
        """The masks of a step by the rows that drop with them."""
        if not steps:
            return {}
        counts = draw_of_steps(loop, self.calls).steps.counts
        pieces = self.call(aten.split_with_sizes.default, steps[0], list(counts))
        return dict(zip(dropping(loop, self.calls), pieces, strict=True))

    def _dropped(self, x: ValueRef, mask: ValueRef, draw: Draw) -> ValueRef:
        """Eager's dropout of a tensor; ``mask``: its elements in the order in which ``draw`` fills memory, on a GPU in
        that of its shape."""
        if draw.op == FUSED:
            mask = self.call(aten.reshape.default, mask, list(draw.shape))
            dtype, keep = draw.operand.dtype, 1 - draw.args[0]
        else:
            order = sorted(range(len(draw.shape)), key=lambda d: (draw.stride[d], draw.shape[d] > 1), reverse=True)
            mask = self.call(aten.reshape.default, mask, [draw.shape[dim] for dim in order])
            mask = self.rows.in_order(mask, [order.index(dim) for dim in range(len(order))])
            dtype, (keep,) = draw.dtype, draw.args
        kept = self.call(aten.div.Tensor, self.call(aten.to.dtype, mask, dtype), keep)
        return self.call(aten.mul.Tensor, x, kept)

    def _written(self, written: Written, parts: ValueRef, reverse: bool) -> ValueRef:
        """A tensor after the loop that writes its parts; these with the steps in front."""
        first, dim, begin, step, extent, squeezed = written
        if (step < 0) != reverse:
            parts = self.rows.flipped(parts)
        value = self.rows.moved(parts, dim)
        if not squeezed:
            value = self.call(aten.flatten.using_ints, value, dim, dim + 1)
        length, (shape, stride, *_) = self.rows.shape(value)[dim], self.calls.forms[first]
        begin = begin if step > 0 else begin + extent - length
        if length < shape[dim] or not torch.empty_strided(shape, stride, device="meta").is_contiguous():
            whole = self._value(first)
            return self.call(aten.slice_scatter.default, whole, value, dim, begin, begin + length)
        return self.rows.contiguous(value)

    def _falls(self, parts: StepParts) -> bool:
        """Whether later parts lie before earlier ones."""
        return parts.falls != (isinstance(parts.of, tuple) and self._looped[parts.of[0]].reverse)

    def _in_front(self, parts: StepParts, steps: int, reverse: bool) -> ValueRef:
        """A tensor with all parts in front; the last one first where the loop is ``reverse``."""
        of, dim, first, step, extent, squeezed = parts
        end, apart = first + step * (steps - 1), abs(step)
        if isinstance(of, tuple):
            loop = self._looped[of[0]]
            begin = min(loop.position(first), loop.position(end))
            whole, stop = loop.whole[Producer(*of[1:])], begin + apart * (steps - 1) + 1
            if apart > 1 or stop - begin != self.rows.shape(whole)[0]:
                whole = self.call(aten.slice.Tensor, whole, 0, begin, stop, apart)
        else:
            whole = self.rows.narrowed(self._value(of), dim, min(first, end), apart * (steps - 1) + extent)
            if apart == extent and not squeezed:
                whole = self.call(aten.unflatten.int, whole, dim, [steps, extent])
            elif apart != extent:  # gaps, or windows that overlap
                whole = self.call(aten.unfold.default, whole, dim, extent, apart)
                rank = len(self.rows.shape(whole))
                if squeezed:
                    whole = self.call(aten.squeeze.dim, whole, -1)
                else:
                    axes = [*range(dim + 1), rank - 1, *range(dim + 1, rank - 1)]
                    whole = self.rows.in_order(whole, axes)
            rank = len(self.rows.shape(whole))
            whole = self.rows.in_order(whole, [dim, *(each for each in range(rank) if each != dim)])
        return self.rows.flipped(whole) if self._falls(parts) != reverse else whole


def _out_of_place(kind: CallKind, layouts: Sequence[ValueLayout]) -> CallKind:
    """``h.add_(x)`` as ``h + x``, which it is where no other tensor has the memory; other kinds as they are."""
    if len(layouts) != 1 or not kind.alone or kind.op is aten.copy_.default:
        return kind
    op, written = kind.op, layouts[0]
    same = getattr(getattr(aten, op.overloadpacket.__name__.removesuffix("_"), None), op._overloadname, None)
    is_dense = torch.empty_strided(*written[:2], device="meta").is_contiguous()
    if same is None or same is op or schema(same).is_mutable or not (written.dtype.is_floating_point and is_dense):
        return kind
    return replace(kind, op=same, gives=0, through=())


def _given(gives: Any, made: Sequence[ValueRef], read: Sequence[ValueRef]) -> Any:
    """What a call returns."""
    if type(gives) is int:
        return made[gives] if gives >= 0 else read[-1 - gives]
    if gives is None or gives[:1] == ("constant",):
        return None if gives is None else gives[1]
    return [_given(each, made, read) for each in gives]
