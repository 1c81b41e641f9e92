"""Loops rolled up: the record of a run → a record with one step of each loop in the place of all its steps.

All steps are proven to be equal (:mod:`bridge.capture.loops.find`). Marks give a step its inputs and take its results
(:mod:`bridge.capture.loops.operators`). Later rows read the last carries, or tensors with the steps in front. On
tensors with the recorded layouts, the new rows compute the same as the old ones. They are few, so later stages take
about as long for 1,000 steps as for 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from autodiff.scan.prove import Carry, Constant, Local, Producer, StepParts, find_loops
from autodiff.scan.replay import LoopReplay, Movements, ReplayedLoop
from bridge.base.log import channel
from bridge.base.torch_fakes import meta_tensor
from bridge.base.torch_internals import OpOverload, aten, schema, storage_id
from bridge.capture.loops.find import (
    FUSED,
    draw_of_steps,
    draws_by_itself,
    dropping,
    reached_from,
)
from bridge.capture.loops.operators import FIRST, LAST, PART, STEPS
from bridge.capture.loops.row_calls import (
    COMPARING,
    CREATING,
    CallLoop,
    NotRolledError,
    RowCall,
    RowCalls,
    calls_of,
)
from bridge.capture.observation import Draw
from bridge.capture.opened import casts_first
from bridge.capture.rows import Form, Record, Row, ValueRef, form_of, mapped, values_in

__all__ = ["LEAST_ROWS", "Rolled", "rolled_up"]


log = channel("dispatch")

LEAST_ROWS = 100
"""A record with fewer rows is short: unrolled for all sizes, it is compiled quickly."""

_WITH_TENSOR = {op: op.overloadpacket.Tensor for op in (*COMPARING, aten.rsub.Scalar)}
"""Operator with a number -> its overload with a tensor in the number's place; other operators take either."""

_META = torch.device("meta")
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


class _Roller(LoopReplay):
    """Replays a record's calls, some of them as loops, into a new record."""

    def __init__(self, record: Record, calls: RowCalls, loops: Sequence[CallLoop]):
        self.calls, self.out, self.call = calls, (out := MadeRows(record)), out.call
        super().__init__(calls, loops, out)
        left_out = sum(loop.period * (loop.steps - 1) for loop in loops)
        is_long = len(record.rows) >= LEAST_ROWS and 2 * left_out >= len(calls.rows)
        self.rolled = Rolled(out.record, sets=bool(calls.last), is_long=is_long)
        self.made.update((value, ValueRef(leaf)) for value, (row, leaf) in enumerate(calls.made) if row < 0)
        self.run()
        self.rolled.draws = out.draws
        self.rolled.results = [self.value(each.number) if type(each) is ValueRef else each for each in calls.results]

    def outside(self, value: int) -> ValueRef:
        part = self.calls.part(value)
        return self.out.part(self.value(part.of), *part[1:])

    def of_step(self, whole: ValueRef, position: int, value: int) -> ValueRef:
        return self.call(aten.clone.default, self.call(aten.select.int, whole, 0, position))

    # Calls

    def row(self, row: int) -> None:
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

    def loop(self, number: int, loop: CallLoop, known: ReplayedLoop) -> None:
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

    def _numbers(self, loop: CallLoop, index: int, numbers: Sequence[Any], reverse: bool) -> ValueRef:
        call, last = self.calls.rows[loop.start + index], self.calls.rows[loop.stop - loop.period + index]
        form = self.calls.forms[call.reads[0] if call.row.op in COMPARING else last.makes[0]]
        return self.out.literal(
            torch.tensor(numbers[::-1] if reverse else numbers, dtype=form.dtype, device=form.device)
        )

    def _masks(self, loop: CallLoop, reverse: bool) -> list[ValueRef]:
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

    def _mask_of(self, loop: CallLoop, steps: Sequence[ValueRef]) -> dict[int, ValueRef]:
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


# Row builder: operators on values of a record → a new record with these rows and the layouts of their results.
#
# Operators run only on meta tensors, which give the layouts of new values.


class MadeRows(Movements):
    """Builds the rows of a new record from the values of an old one; meta tensors give the layouts of new values."""

    def __init__(self, of: Record):
        known = {"inputs": of.inputs, "literals": dict(of.literals), "free": of.free, "reads": of.reads}
        self.record = Record(forms=list(of.forms), memory=list(of.memory), **known)
        self.draws: list[Draw] = []
        self.like: Row | None = None  # gives line, path and grad mode of the next rows
        self._metas: dict[int, torch.Tensor] = {}
        self._memory: dict[int, int] = {}

    def shape(self, value: ValueRef) -> Sequence[int]:
        """The shape of a value."""
        return self.record.forms[value.number].shape

    def _meta(self, value: ValueRef) -> torch.Tensor:
        number = value.number
        if number not in self._metas:
            self._metas[number] = made = meta_tensor(self.record.forms[number])
            memory = self.record.memory[number]
            self._memory.setdefault(storage_id(made), number if memory < 0 else memory)
        return self._metas[number]

    def _value(self, made: torch.Tensor, device: torch.device, requires_grad: bool = False) -> ValueRef:
        number = len(self.record.forms)
        self.record.forms.append(form_of(made)._replace(device=device, requires_grad=requires_grad))
        self.record.memory.append(self._memory.setdefault(storage_id(made), number))
        self._metas[number] = made
        return ValueRef(number)

    def literal(self, tensor: torch.Tensor) -> ValueRef:
        """Adds a literal: a tensor that is no input and made by no row."""
        made = self._value(tensor.to(_META), tensor.device)
        self.record.literals[made.number] = tensor
        return made

    def of_layout(self, form: Form, base: ValueRef | None) -> ValueRef:
        """A new value with a layout; ``base``: a value whose memory it shares."""
        if base is not None and self.record.forms[base.number].dtype == form.dtype:
            made = self._meta(base).as_strided(form.shape, form.stride)
        else:
            made = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=_META)
        return self._value(made, form.device, form.requires_grad)

    def add(self, op: Any, args: tuple, kwargs: dict, results: Any, draw: Draw | None = None) -> None:
        """Adds a row."""
        like, before = self.like, len(self.draws)
        if draw is not None:
            self.draws.append(draw)
        draws = before, len(self.draws)
        self.record.rows.append(Row(op, args, kwargs, results, like.grad, draws, like.where, like.path))

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds a row for an operator's call and makes its results as new values → the results."""
        device = self.record.forms[next(values_in(args))].device
        with torch.no_grad():
            metas = mapped((args, kwargs), ValueRef, self._meta)
            results = mapped(op(*metas[0], **metas[1]), torch.Tensor, lambda made: self._value(made, device))
        self.add(op, args, kwargs, results)
        return results

    def part(self, whole: ValueRef, dim: int, begin: int, extent: int, squeezed: bool) -> ValueRef:
        """Takes a part of a value, as :class:`autodiff.scan.prove.Part`."""
        if squeezed:
            return self.call(aten.select.int, whole, dim, begin)
        return self.narrowed(whole, dim, begin, extent)

    def contiguous(self, value: ValueRef) -> ValueRef:
        """A contiguous copy."""
        return self.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def slice(self, value: ValueRef, dim: int, begin: int, end: int, step: int = 1) -> ValueRef:
        return self.call(aten.slice.Tensor, value, dim, begin, end, *[step] * (step > 1))

    def permute(self, value: ValueRef, axes: list[int]) -> ValueRef:
        return self.call(aten.permute.default, value, axes)

    def flip(self, value: ValueRef) -> ValueRef:
        return self.call(aten.flip.default, value, [0])

    def windows(self, value: ValueRef, parts: StepParts, steps: int) -> ValueRef:
        """The parts of all steps with the steps in front; parts may overlap or leave gaps."""
        dim, extent, apart, squeezed = parts.dim, parts.extent, abs(parts.step), parts.form
        if apart == extent and not squeezed:
            value = self.call(aten.unflatten.int, value, dim, [steps, extent])
        elif apart != extent:
            value = self.call(aten.unfold.default, value, dim, extent, apart)
            rank = len(self.shape(value))
            if squeezed:
                value = self.call(aten.squeeze.dim, value, -1)
            else:
                value = self.in_order(value, [*range(dim + 1), rank - 1, *range(dim + 1, rank - 1)])
        return self.to_front(value, dim)
