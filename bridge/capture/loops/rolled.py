"""Loops rolled up: the record of a run → a record with one step of each loop in the place of all its steps.

All steps are proven to be equal (:mod:`bridge.capture.loops.prove`). Marks give a step its inputs and take its results
(:mod:`bridge.capture.loops.operators`). Later rows read the last carries, or tensors with the steps in front. On
tensors with the recorded layouts, the new rows compute the same as the old ones. They are few, so later stages take
about as long for 1,000 steps as for 10. The inputs and results of a step become tensors with the steps in front. Parts
of one tensor are cut out of it; a later reader of one step's value gets a slice of all steps' results; a concatenation
of adjacent steps' results reads them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import torch

from bridge.base.log import channel
from bridge.base.torch_internals import OpOverload, aten, schema
from bridge.capture.loops.made_rows import MadeRows
from bridge.capture.loops.operators import FIRST, LAST, PART, STEPS
from bridge.capture.loops.prove import FUSED, draw_of_steps, draws_by_itself, dropping, find_loops, reached_from
from bridge.capture.loops.proven_loop import Carry, Constant, Local, Producer, ProvenLoop, StepParts
from bridge.capture.loops.row_calls import (
    COMPARING,
    CREATING,
    NotRolledError,
    RowCall,
    RowCalls,
    calls_of,
)
from bridge.capture.observation import Draw
from bridge.capture.opened import casts_first
from bridge.capture.rows import Form, Record, Row, ValueRef, mapped, values_in

log = channel("dispatch")

LEAST_ROWS = 100
"""A record with fewer rows is short: unrolled for all sizes, it is compiled quickly."""

_WITH_TENSOR = {op: op.overloadpacket.Tensor for op in (*COMPARING, aten.rsub.Scalar)}
"""Operator with a number -> its overload with a tensor in the number's place; other operators take either."""

_WITH = ValueRef(-1)
"""Placeholder of a value in the place of a call's number."""


@dataclass
class Rolled:
    """A record with loops rolled up.

    Attributes:
        record: its rows; their values follow all values of the original record.
        results: the leaves of its result, values for tensors.
        draws: its draws, in order.
        writes: whether a row writes in place that could not be made functional.
        same_steps: whether steps differ only in carries and parts, and write into no part of a tensor.
        sets: whether it writes inputs.
        is_long: whether the record has :data:`LEAST_ROWS` rows or more, at least half of which the loops leave out.
    """

    record: Record
    results: list[Any] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    writes: bool = False
    same_steps: bool = True
    sets: bool = False
    is_long: bool = False


def rolled_up(record: Record, results: Sequence[Any], draws: Sequence[Draw]) -> Rolled | None:
    """Rolls up the loops of a record; ``None`` if it has none, or if it cannot.

    Args:
        results: the leaves of the run's result, values for tensors.
        draws: the run's draws.
    """
    if any(len(form.stride) != len(form.shape) for form in record.forms):
        return None  # tensors without strides
    try:
        record = casts_first(record)
        calls = calls_of(record, results, draws)
        loops = find_loops(calls)
        return _Roller(record, calls, loops).rolled if loops else None
    except NotRolledError as error:
        log.debug("loops are left as they are: %s", error)
        return None


@dataclass
class _ReplayedLoop:
    """A loop that was made: its last carries, and its results of all steps.

    Attributes:
        steps, reverse: number of steps, and whether tensors of all steps begin with the last step.
    """

    steps: int
    reverse: bool
    last: dict[Producer, ValueRef] = field(default_factory=dict)
    whole: dict[Producer, ValueRef] = field(default_factory=dict)

    def position(self, step: int) -> int:
        """The index of a step in tensors of all steps."""
        return self.steps - 1 - step if self.reverse else step


class _Roller:
    """Replays a record's calls, some of them as loops, into a new record."""

    def __init__(self, record: Record, calls: RowCalls, loops: Sequence[ProvenLoop]):
        self.calls, self.loops, self.out, self.call = calls, loops, (out := MadeRows(record)), out.call
        self.made: dict[int, ValueRef] = {}
        self.replayed: list[_ReplayedLoop] = []
        self.loop_of = {row: number for number, loop in enumerate(loops) for row in range(loop.start, loop.stop)}
        self._others = [row for row in range(len(calls.rows)) if row not in self.loop_of]
        left_out = sum(loop.period * (loop.steps - 1) for loop in loops)
        is_long = len(record.rows) >= LEAST_ROWS and 2 * left_out >= len(calls.rows)
        self.rolled = Rolled(out.record, sets=bool(calls.last), is_long=is_long)
        self.made.update((value, ValueRef(leaf)) for value, (row, leaf) in enumerate(calls.made) if row < 0)
        self._run()
        self.rolled.draws = out.draws
        self.rolled.results = [self.value(each.number) if type(each) is ValueRef else each for each in calls.results]

    def _run(self) -> None:
        """Makes all rows and loops, in order."""
        begins = {loop.start: number for number, loop in enumerate(self.loops)}
        for row in sorted([*self._others, *begins]):
            if row not in begins:
                self._row(row)
                continue
            loop = self.loops[begins[row]]
            known = _ReplayedLoop(loop.steps, bool(loop.parts) and all(map(self._falls, loop.parts)))
            self._loop(begins[row], loop, known)
            self.replayed.append(known)

    def value(self, value: int) -> ValueRef:
        """The new value of an old one; a step's result is sliced at its first use."""
        if value not in self.made:
            place = self.place(value)
            if place is None or place[2].row in self.loops[place[0]].taken:
                part = self.calls.part(value)
                self.made[value] = self.out.part(self.value(part.of), *part[1:])
            elif self._is_last(place):
                self.made[value] = self.replayed[place[0]].last[place[2]]
            else:
                known = self.replayed[place[0]]
                part = self.call(aten.select.int, known.whole[place[2]], 0, known.position(place[1]))
                self.made[value] = self.call(aten.clone.default, part)
        return self.made[value]

    def place(self, value: int) -> tuple[int, int, Producer] | None:
        """The origin of a value in a loop: the loop's number, the step, the result of a step; else ``None``."""
        row, leaf = self.calls.made[value]
        number = self.loop_of.get(row)
        if number is None:
            return None
        step, index = divmod(row - self.loops[number].start, self.loops[number].period)
        return number, step, Producer(index, leaf)

    def _is_last(self, place: tuple[int, int, Producer]) -> bool:
        """Whether a value is a carry's value after the last step."""
        loop = self.loops[place[0]]
        return place[1] == loop.steps - 1 and place[2] in loop.carried

    def leaving(self, number: int) -> list[Producer]:
        """The results of a step that are read after the loop, for any step."""
        found: dict[Producer, None] = {}
        values = [value for row in self._others for value in self.calls.reads[row]]
        for other, loop in enumerate(self.loops):
            of_loops = [parts.of for parts in loop.parts if isinstance(parts.of, tuple)]
            found.update((Producer(row, leaf), None) for of, row, leaf in of_loops if of == number)
            values += loop.given if other != number else ()
        for place in map(self.place, (*values, *self.calls.needed)):
            if place is None or place[0] != number or place[2].row in self.loops[number].taken:
                continue
            if not self._is_last(place):
                found.setdefault(place[2])
        return list(found)

    def adjacent(self, values: Sequence[int]) -> list[list[int]]:
        """Consecutive values grouped by adjacent steps, ascending or descending, of one result."""
        groups: list[list[int]] = []
        places, steps = [self.place(value) for value in values], 0
        for value, (before, place) in zip(values, pairwise([None, *places]), strict=True):
            apart = place[1] - before[1] if None not in (place, before) and place[::2] == before[::2] else 0
            if abs(apart) == 1 and (len(groups[-1]) == 1 or apart == steps):
                groups[-1].append(value)
                steps = apart
            else:
                groups.append([value])
        return groups

    def of_steps(self, values: Sequence[int]) -> ValueRef:
        """Adjacent steps' values as one tensor with the steps in front, in the given order."""
        (number, first, producer), (_, last, _) = self.place(values[0]), self.place(values[-1])
        known = self.replayed[number]
        begin, end = known.position(first), known.position(last)
        whole = self.out.narrowed(known.whole[producer], 0, min(begin, end), len(values))
        return self.out.flip(whole) if end < begin else whole

    def _falls(self, parts: StepParts) -> bool:
        """Whether later steps read earlier positions of the tensor."""
        return parts.falls != (isinstance(parts.of, tuple) and self.replayed[parts.of[0]].reverse)

    def in_front(self, parts: StepParts, known: _ReplayedLoop) -> ValueRef:
        """A tensor with the parts of all steps in front, in the order of the loop's tensors."""
        of, dim, first, step, extent, _ = parts
        steps, end, apart = known.steps, first + step * (known.steps - 1), abs(step)
        if isinstance(of, tuple):
            loop = self.replayed[of[0]]
            begin, whole = min(loop.position(first), loop.position(end)), loop.whole[Producer(*of[1:])]
            if apart == 1:
                whole = self.out.narrowed(whole, 0, begin, steps)
            else:
                whole = self.out.slice(whole, 0, begin, begin + apart * (steps - 1) + 1, apart)
        else:
            whole = self.out.narrowed(self.value(of), dim, min(first, end), apart * (steps - 1) + extent)
            whole = self.out.windows(whole, parts, steps)
        return self.out.flip(whole) if self._falls(parts) != known.reverse else whole

    # Calls

    def _row(self, row: int) -> None:
        """Adds a call that is in no loop; a part of a tensor is added at its readers."""
        call = self.calls.rows[row]
        if not call.makes and row in self.calls.drawn:
            raise NotRolledError("a draw of what nothing else needs")
        if call.makes and self.calls.part(call.makes[0]) is not None:
            return
        self.out.like = call.row
        self._check_memory(row, call)
        joined = self._joined(call)
        if joined is not None:
            made = [joined]
        else:
            read = [self.value(value) for value in call.reads]
            made = self._call(call, read, call, draw=self.calls.drawn.get(row))
        self.made.update(zip(call.makes, made, strict=True))

    def _check_memory(self, row: int, call: RowCall) -> None:
        """Refuses a write outside of the loops if the new rows would not share its memory as the old rows did: the
        results of a loop are copies, and later views of a copy share its memory."""
        if len(call.through) < 2:
            return
        rows = [self.calls.made[call.reads[place]].row for place in call.through]
        looped = [each for each in rows if each in self.loop_of]
        if not looped:
            return
        stop = self.loops[self.loop_of[looped[0]]].stop
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
        """Adds a call → the values that it makes; ``like``: the call of the last step, which gives its results'
        layouts; ``number``: a value in the place of its number."""
        self.out.like = like.row
        if call.into is not None:
            view = self.out.part(read[0], *call.into[1:])
            self.out.add(aten.copy_.default, (view, read[1]), {}, view)
            self.rolled.writes = True
            return [read[0]]
        if call.part is not None:
            return [self.out.part(read[0], *call.part[1:])]
        layouts = [self.calls.forms[value] for value in like.makes]
        row, op = call.row, _out_of_place(call, layouts)
        through = call.through if op is row.op else ()
        self.rolled.writes |= isinstance(op, OpOverload) and schema(op).is_mutable
        layouts = layouts[: len(layouts) - len(through)]
        if number is not None and op in CREATING:
            return [self.out.contiguous(self.call(aten.expand.default, number, list(layouts[0].shape)))]
        given, args = iter(read), row.args
        if number is not None:
            args = (*args[: call.numbered], _WITH, *args[call.numbered + 1 :])
        args, kwargs = mapped((args, row.kwargs), ValueRef, lambda each: number if each is _WITH else next(given))
        made = [self.out.of_layout(*each) for each in zip_longest(layouts, self._bases(like.row, read, len(layouts)))]
        value_of = dict(zip((*_fresh(row), *_operands(row)), (*made[: len(_fresh(row))], *read), strict=False))
        results = made[0] if op is not row.op else mapped(row.results, ValueRef, lambda each: value_of[each.number])
        op = op if number is None else _WITH_TENSOR.get(op, op)
        self.out.add(op, args, kwargs, results, draw)
        return [*made, *(read[place] for place in through)]

    def _bases(self, row: Row, read: Sequence[ValueRef], count: int) -> list[ValueRef | None]:
        """For each new value of a record's row, the replayed operand that shares its memory, or ``None``."""
        memory = self.out.record.memory
        of = dict(zip((memory[number] for number in _operands(row)), read, strict=False))
        return [of.get(memory[each]) for each in _fresh(row)[:count]]

    def _joined(self, call: RowCall) -> ValueRef | None:
        """A ``stack`` or ``cat`` of adjacent steps' results, read as one tensor; ``None`` for other calls."""
        op, values = call.row.op, call.reads
        if op not in (aten.stack.default, aten.cat.default):
            return None
        groups = self.adjacent(values)
        if len(groups) == len(values) or len({self.calls.forms[value].shape for value in values}) > 1:
            return None
        rank, stacks = len(self.calls.forms[values[0]].shape), op is aten.stack.default
        dim = call.argument(1, "dim", 0) % (rank + 1 if stacks else rank)
        pieces = []
        for group in groups:
            if len(group) == 1:
                piece = self.value(group[0])
                pieces.append(self.call(aten.unsqueeze.default, piece, dim) if stacks else piece)
            else:
                piece = self.out.to_dim(self.of_steps(group), dim)
                pieces.append(piece if stacks else self.call(aten.flatten.using_ints, piece, dim, dim + 1))
        return self.call(aten.cat.default, pieces, dim) if len(pieces) > 1 else self.out.contiguous(pieces[0])

    # Loops

    def _loop(self, number: int, loop: ProvenLoop, known: _ReplayedLoop) -> None:
        """Adds one step of a loop between its marks."""
        calls, period, steps = self.calls, loop.period, loop.steps
        self.out.like = calls.rows[loop.stop - period].row
        self.rolled.same_steps &= not (loop.numbers or loop.written or dropping(loop, calls))
        whole = {parts: self.in_front(parts, known) for parts in loop.parts}
        firsts = [self.value(carry.first) for carry in loop.carries]
        constants = {role: self.value(role.value) for role in loop.of_kind(Constant)}
        numbers = {index: self._numbers(loop, index, each, known.reverse) for index, each in loop.numbers.items()}
        masks, by_itself = self._masks(loop, known.reverse), draws_by_itself(loop, calls)
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
            draw = calls.drawn.get(loop.start + index)
            if not call.makes:  # it only draws
                if by_itself:
                    raise NotRolledError("a draw of what nothing else needs")
                continue
            read = [made[role] if isinstance(role, Local) else given[role] for role in roles]
            if index in loop.written:
                results = read
                self.rolled.writes = True
            elif index in mask_of:
                self.out.like = last.row
                results = [self._dropped(read[0], mask_of[index], draw)]
            else:
                results = self._call(call, read, last, number_of.get(index), draw)
            made.update(((index, leaf), each) for leaf, each in enumerate(results))
        for place, carry in enumerate(loop.carries):
            after = made[carry.row, carry.leaf] if carry.of is None else before[carry.of]
            last = self.call(LAST, after, number, place)
            if carry.of is None:
                known.last.setdefault(Producer(carry.row, carry.leaf), last)
        leaving = self.leaving(number)
        for place, y in enumerate(leaving):
            known.whole[y] = self.call(STEPS, made[y], number, place, steps)
        for place, (index, written) in enumerate(loop.written.items(), start=len(leaving)):
            values = self.call(STEPS, made[index, 0], number, place, steps)
            known.last[Producer(index, 0)] = self._written(written, values, known.reverse)

    def _numbers(self, loop: ProvenLoop, index: int, numbers: Sequence[Any], reverse: bool) -> ValueRef:
        call, last = self.calls.rows[loop.start + index], self.calls.rows[loop.stop - loop.period + index]
        form = self.calls.forms[call.reads[0] if call.row.op in COMPARING else last.makes[0]]
        return self.out.literal(
            torch.tensor(numbers[::-1] if reverse else numbers, dtype=form.dtype, device=form.device)
        )

    def _masks(self, loop: ProvenLoop, reverse: bool) -> list[ValueRef]:
        """Draws the masks of all steps at once → one value with a row for each step, or none."""
        draw = draw_of_steps(loop, self.calls)
        if draw is None:
            return []
        whole = self.out.of_layout(Form(draw.shape, draw.stride, 0, torch.bool, draw.device, False), None)
        self.out.add(aten.empty.memory_format, (list(draw.shape),), {"dtype": torch.bool, "device": draw.device}, whole)
        self.out.add(aten.bernoulli_.float, (whole, *draw.args), {}, whole, draw)
        if not loop.carries:
            return []
        return [self.out.flip(whole) if reverse else whole]

    def _mask_of(self, loop: ProvenLoop, steps: Sequence[ValueRef]) -> dict[int, ValueRef]:
        """Row of a step that drops out -> its mask."""
        if not steps:
            return {}
        counts = draw_of_steps(loop, self.calls).steps.counts
        pieces = self.call(aten.split_with_sizes.default, steps[0], list(counts))
        return dict(zip(dropping(loop, self.calls), pieces, strict=True))

    def _dropped(self, x: ValueRef, mask: ValueRef, draw: Draw) -> ValueRef:
        """Eager's dropout of a tensor; ``mask``: flat, in ``draw``'s memory order; on a GPU in row-major order."""
        if draw.op == FUSED:
            mask = self.call(aten.reshape.default, mask, list(draw.shape))
            dtype, keep = draw.operand.dtype, 1 - draw.args[0]
        else:
            order = sorted(range(len(draw.shape)), key=lambda d: (draw.stride[d], draw.shape[d] > 1), reverse=True)
            mask = self.call(aten.reshape.default, mask, [draw.shape[dim] for dim in order])
            mask = self.out.in_order(mask, [order.index(dim) for dim in range(len(order))])
            dtype, (keep,) = draw.dtype, draw.args
        kept = self.call(aten.div.Tensor, self.call(aten.to.dtype, mask, dtype), keep)
        return self.call(aten.mul.Tensor, x, kept)

    def _written(self, written: StepParts, parts: ValueRef, reverse: bool) -> ValueRef:
        """A tensor after the loop that writes its parts; ``parts``: their new values, the steps in front."""
        of, dim, begin, step, extent, squeezed = written
        if (step < 0) != reverse:
            parts = self.out.flip(parts)
        value = self.out.to_dim(parts, dim)
        if not squeezed:
            value = self.call(aten.flatten.using_ints, value, dim, dim + 1)
        length, (shape, stride, *_) = self.out.shape(value)[dim], self.calls.forms[of]
        begin = begin if step > 0 else begin + extent - length
        if length < shape[dim] or not torch.empty_strided(shape, stride, device="meta").is_contiguous():
            whole = self.value(of)
            return self.call(aten.slice_scatter.default, whole, value, dim, begin, begin + length)
        return self.out.contiguous(value)


def _operands(row: Row) -> list[int]:
    return list(values_in((row.args, row.kwargs)))


def _fresh(row: Row) -> list[int]:
    """The values of a row's results that are no operands."""
    return [each for each in dict.fromkeys(values_in(row.results)) if each not in _operands(row)]


def _out_of_place(call: RowCall, layouts: Sequence[Form]) -> Any:
    """``h.add_(x)`` as ``h + x``, which is exact if no other tensor has the memory; other operators unchanged."""
    op = call.row.op
    if len(layouts) != 1 or not call.alone or op is aten.copy_.default:
        return op
    written = layouts[0]
    same = getattr(getattr(aten, op.overloadpacket.__name__.removesuffix("_"), None), op._overloadname, None)
    is_dense = torch.empty_strided(*written[:2], device="meta").is_contiguous()
    if same is None or schema(same).is_mutable or not (written.dtype.is_floating_point and is_dense):
        return op
    return same
