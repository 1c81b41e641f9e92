"""Loops rolled up: the record of a run → a record with one step of each loop in the place of all its steps.

All steps are proven to be equal (:mod:`bridge.capture.loops.find`). What a step is given and gives is marked
(:mod:`bridge.capture.loops.operators`); what is read of a loop afterwards is read from the last carries, or from
tensors with the steps in front. On tensors of the layouts that were recorded the new rows compute what the old ones
did, with the meaning that the marks have. They are few, so that what comes after takes about as long for 1,000 steps as
for 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from bridge.base.log import channel
from bridge.base.torch_internals import FakeTensorMode, OpOverload, aten, schema
from bridge.capture.loops.find import evenly_alive, find_loops
from bridge.capture.loops.operators import FIRST, LAST, PART, STEPS
from bridge.capture.loops.row_calls import COMPARING, CREATING, NotRolledError, calls_of, filled
from bridge.capture.loops.row_form import FUSED, Folded, FoldedCall, FoldedJoin, FoldedLoop, Source, fold
from bridge.capture.observation import Draw
from bridge.capture.rows import Record, Row, ValueRef, form_of, mapped, values_in

__all__ = ["LEAST_ROWS", "Rolled", "draws_of", "folded_of", "spelled_out", "writes"]

log = channel("dispatch")

LEAST_ROWS = 100
"""A record of fewer rows stays as it is."""

_WITH_TENSOR = {op: op.overloadpacket.Tensor for op in (*COMPARING, aten.rsub.Scalar)}
"""Of operators with a number, those that take a tensor in its place; others take either."""


@dataclass
class Rolled:
    """A record with loops rolled up.

    Attributes:
        record, fakes: its rows, and of each value a fake tensor.
        results: what it returns, values for tensors.
        draws: what it draws, in order.
        form: the folded form.
    """

    record: Record
    fakes: dict[int, torch.Tensor]
    results: list[Any]
    draws: list[Draw]
    form: Folded


def folded_of(record: Record, results: Sequence[Any], draws: Sequence[Draw]) -> Folded | None:
    """The folded form of a record, ``None`` if it has no loops, or most of its rows are in none.

    Args:
        results: what the run returned, values for tensors.
        draws: what it drew.
    """
    if len(record.rows) < LEAST_ROWS:
        return None
    try:
        calls = calls_of(record, results, draws)
        loops = evenly_alive(calls, find_loops(calls))
        left_out = sum(loop.period * (loop.steps - 1) for loop in loops)
        if 2 * left_out < len(calls.rows) or not loops:
            return None
        return fold(calls, loops)
    except NotRolledError as error:
        log.debug("loops are left as they are: %s", error)
        return None


def draws_of(form: Folded) -> list[Draw]:
    """What a folded form draws, in order."""
    return [each.draw for each in form.made if not isinstance(each, FoldedJoin) and each.draw is not None]


def writes(form: Folded) -> bool:
    """Whether a call writes in place, and not what it could return as well."""
    calls = [call for each in form.made for call in (each.rows if isinstance(each, FoldedLoop) else (each,))]
    ops = [_out_of_place(call).op for call in calls if isinstance(call, FoldedCall)]
    return any(isinstance(op, OpOverload) and schema(op).is_mutable for op in ops)


def spelled_out(form: Folded, record: Record, fakes: dict[int, torch.Tensor], mode: FakeTensorMode) -> Rolled:
    """A folded form as rows, on the inputs and literals of a record."""
    run = _Run(form, record, fakes, mode)
    return Rolled(run.rows.record, run.rows.fakes, run.results(), run.rows.draws, form)


class _Rows:
    """Rows of a record that is made, on fake tensors."""

    def __init__(self, record: Record, fakes: dict[int, torch.Tensor], mode: FakeTensorMode):
        known = {"inputs": record.inputs, "literals": dict(record.literals), "free": record.free, "reads": record.reads}
        self.record = Record(forms=list(record.forms), memory=list(record.memory), **known)
        self.fakes = dict(fakes)
        self.draws: list[Draw] = []
        self.mode, self.grad = mode, torch.is_grad_enabled()

    def value(self, fake: torch.Tensor) -> ValueRef:
        """A new value."""
        number = len(self.record.forms)
        self.record.forms.append(form_of(fake))
        self.record.memory.append(number)
        self.fakes[number] = fake
        return ValueRef(number)

    def literal(self, tensor: torch.Tensor) -> ValueRef:
        """Numbers that are no input and made by no row."""
        made = self.value(self.mode.from_tensor(tensor, static_shapes=True))
        self.record.literals[made.number] = tensor
        return made

    def of_form(self, form: tuple, base: ValueRef | None) -> ValueRef:
        """A new value of this form; ``base``: one whose memory it lies in."""
        shape, stride, dtype, device, _ = form
        with torch.no_grad(), self.mode:
            if base is not None and self.fakes[base.number].dtype == dtype:
                return self.value(self.fakes[base.number].as_strided(shape, stride))
            return self.value(torch.empty_strided(shape, stride, dtype=dtype, device=device))

    def bases(self, row: Row, read: Sequence[ValueRef]) -> list[ValueRef | None]:
        """For each new value of a row of the record, which of those that stand for its operands shares its memory."""
        if self.mode.shape_env is not None:  # the row is one of another length
            return []
        memory, operands = self.record.memory, list(values_in((row.args, row.kwargs)))
        of = dict(zip((memory[number] for number in operands), read, strict=False))
        return [of.get(memory[each]) for each in dict.fromkeys(values_in(row.results)) if each not in operands]

    def add(self, op: Any, args: tuple, kwargs: dict, results: Any, like: Row, draw: Draw | None = None) -> None:
        """A row that stands where another one did."""
        before = len(self.draws)
        if draw is not None:
            self.draws.append(draw)
        draws = before, len(self.draws)
        self.record.rows.append(Row(op, args, kwargs, results, like.grad, like.autocast, draws, like.where, like.path))

    def call(self, like: Row, op: Any, *args: Any, draw: Draw | None = None, **kwargs: Any) -> Any:
        """A row of an operator that is called on fake tensors for the layouts of its results."""
        with torch.no_grad(), self.mode:
            fakes = mapped((args, kwargs), ValueRef, lambda value: self.fakes[value.number])
            made = op(*fakes[0], **fakes[1])
        written = args[0] if op is aten.bernoulli_.float else None
        results = mapped(made, torch.Tensor, self.value) if written is None else written
        self.add(op, args, kwargs, results, like, draw)
        return results


@dataclass
class _Looped:
    """What is known of a loop whose rows are made: its last carries, and its results of all steps."""

    steps: Any
    reverse: bool
    last: dict[tuple[int, int], ValueRef] = field(default_factory=dict)
    whole: dict[tuple[int, int], ValueRef] = field(default_factory=dict)


class _Run:
    """The rows of a folded form."""

    def __init__(self, form: Folded, record: Record, fakes: dict[int, torch.Tensor], mode: FakeTensorMode):
        self.form, self.rows = form, _Rows(record, fakes, mode)
        self.values: dict[Source, ValueRef] = {}
        self.done: list[list[ValueRef]] = []
        self.loops: list[_Looped] = []
        self.like = next(_origins(form))
        for each in form.made:
            match each:
                case FoldedLoop():
                    self.done.append([])
                    self._loop(each)
                case FoldedJoin():
                    self.like = each.origin.row
                    self.done.append([self._joined(each)])
                case FoldedCall():
                    self.like = each.origin.row
                    self.done.append(self._call(each, [self.value(source) for source in each.reads]))

    def results(self) -> list[Any]:
        """The leaves of what is returned."""
        return [self.value(leaf) if len(leaf) > 1 else leaf[0] for leaf in self.form.results]

    def value(self, source: Source) -> ValueRef:
        """Of a step, or of a part, one that is made once."""
        try:
            known = self.values.get(source)
        except TypeError:  # torch's symbols in it have no hash
            return self._found(*source)
        if known is None:
            known = self.values[source] = self._found(*source)
        return known

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rows.call(self.like, op, *args, **kwargs)

    def _found(self, kind: str, *rest: Any) -> ValueRef:
        match kind:
            case "input" | "other":
                return ValueRef(rest[0])
            case "made":
                return self.done[rest[0]][rest[1]]
            case "part":
                return self._take(self.value(rest[0]), *rest[1:])
            case "last":
                return self.loops[rest[0]].last[rest[1:]]
        number, row, leaf, step = rest
        loop = self.loops[number]
        part = self.call(aten.select.int, loop.whole[row, leaf], 0, _position(loop, step))
        return self.call(aten.clone.default, part)

    def _take(self, whole: ValueRef, dim: int, begin: Any, extent: Any, squeezed: bool) -> ValueRef:
        if squeezed:
            return self.call(aten.select.int, whole, dim, begin)
        return self._narrowed(whole, dim, begin, extent)

    def _shape(self, value: ValueRef) -> Sequence[Any]:
        return self.rows.fakes[value.number].shape

    def _narrowed(self, whole: ValueRef, dim: int, begin: Any, extent: Any) -> ValueRef:
        if extent == self._shape(whole)[dim]:
            return whole
        return self.call(aten.slice.Tensor, whole, dim, begin, begin + extent)

    def _in_order(self, whole: ValueRef, axes: list[int]) -> ValueRef:
        return whole if axes == sorted(axes) else self.call(aten.permute.default, whole, axes)

    def _moved(self, steps: ValueRef, dim: int) -> ValueRef:
        """A tensor whose first axis has become this one."""
        rank = len(self._shape(steps))
        return self._in_order(steps, [*range(1, dim + 1), 0, *range(dim + 1, rank)])

    def _flipped(self, whole: ValueRef) -> ValueRef:
        return self.call(aten.flip.default, whole, [0])

    def _contiguous(self, value: ValueRef) -> ValueRef:
        return self.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    # Calls

    def _call(self, call: FoldedCall, read: Sequence[ValueRef], number: ValueRef | None = None) -> list[ValueRef]:
        """The row of a call, and the values that it makes."""
        like, call = self.like, _out_of_place(call)
        if call.into:
            view = self._take(read[0], *call.part)
            self.rows.add(call.op, (view, read[1]), {}, view, like)
            return [read[0]]
        if call.part is not None:
            return [self._take(read[0], *call.part)]
        forms = call.forms[: len(call.forms) - len(call.through)]
        if number is not None and call.op in CREATING:
            whole = self.call(aten.expand.default, number, list(forms[0][0]))
            return [self._contiguous(whole)]
        op = call.op if number is None else _WITH_TENSOR.get(call.op, call.op)
        given = iter(read)
        fill = call.number if number is None else number
        args = filled(call.args, given, fill)
        kwargs = filled(call.kwargs, given, fill)
        made = [self.rows.of_form(*each) for each in zip_longest(forms, self.rows.bases(like, read)[: len(forms)])]
        results = _given(call.gives, made, read)
        self.rows.add(op, args, kwargs, results, like, call.draw)
        return [*made, *(read[place] for place in call.through)]

    def _joined(self, join: FoldedJoin) -> ValueRef:
        pieces = [self._piece(source, join) for source in join.pieces]
        return self.call(aten.cat.default, pieces, join.dim) if len(pieces) > 1 else self._contiguous(pieces[0])

    def _piece(self, source: Source, join: FoldedJoin) -> ValueRef:
        if source[0] != "steps":
            piece = self.value(source)
            return self.call(aten.unsqueeze.default, piece, join.dim) if join.stacks else piece
        _, number, row, leaf, *ends = source
        loop = self.loops[number]
        begin, end = (_position(loop, step) for step in ends)
        falls = end < begin
        begin, end = (end, begin) if falls else (begin, end)
        whole = self._narrowed(loop.whole[row, leaf], 0, begin, end - begin + 1)
        steps = self._moved(self._flipped(whole) if falls else whole, join.dim)
        return steps if join.stacks else self.call(aten.flatten.using_ints, steps, join.dim, join.dim + 1)

    # Loops

    def _loop(self, loop: FoldedLoop) -> None:
        """The rows of one step, with marks around them."""
        number = len(self.loops)
        self.like = next(_origins(Folded((loop,), (), ())), self.like)
        falling = [self._falls(part) for part in loop.parts]
        known = _Looped(loop.steps, bool(falling) and all(falling))
        whole = [self._in_front(part, loop.steps, known.reverse) for part in loop.parts]
        parts = [self.call(PART, tensor, number, place) for place, tensor in enumerate(whole)]
        place = len(parts)
        numbers: dict[int, ValueRef] = {}
        for place, (index, each) in enumerate(loop.numbers, start=len(parts)):
            numbers[index] = self.call(PART, self._numbers(loop.rows[index], each, known.reverse), number, place)
        masks = self._masks(loop, number, len(parts) + len(numbers), known.reverse)

        def source(role: tuple) -> ValueRef:
            if role[0] == "part of":
                return whole[role[1]]
            return self.value(loop.carries[role[1]][2] if role[0] == "carry" else role)

        first = []
        for place, (carry, roles) in enumerate(zip(loop.carries, loop.reached, strict=True)):
            reached = list(map(source, roles))
            first.append(self.call(FIRST, self.value(carry[2]), reached, number, place, loop.steps, known.reverse))
        made: dict[tuple[int, int], ValueRef] = {}
        outside = {role: self.value(role) for role in _outside(loop)}

        def value(role: tuple) -> ValueRef:
            match role:
                case "local", row, leaf:
                    return made[row, leaf]
                case "carry", place:
                    return first[place]
                case "part of", place:
                    return parts[place]
            return outside[role]

        written = {each[0] for each in loop.written}
        drops = dict(loop.drops)
        for index, row in enumerate(loop.rows):
            if isinstance(row, FoldedCall):
                self.like = row.origin.row
                read = [value(role) for role in row.reads]
                if index in written:
                    results = read
                elif index in drops:
                    results = [self._dropped(read[0], masks[index], drops[index])]
                else:
                    results = self._call(row, read, numbers.get(index))
                made.update(((index, leaf), each) for leaf, each in enumerate(results))
            elif row is not None:
                made[index, 0] = parts[row]
        for place, (row, leaf, _, before) in enumerate(loop.carries):
            last = self.call(LAST, made[row, leaf] if before is None else first[before], number, place)
            if before is None:
                known.last.setdefault((row, leaf), last)
        for place, y in enumerate(loop.ys):
            known.whole[y] = self.call(STEPS, made[y], number, place, loop.steps)
        for place, each in enumerate(loop.written, start=len(loop.ys)):
            steps = self.call(STEPS, made[each[0], 0], number, place, loop.steps)
            known.last[each[0], 0] = self._written(*each[1:], steps, known.reverse)
        self.loops.append(known)

    def _numbers(self, row: FoldedCall, numbers: Sequence[Any], reverse: bool) -> ValueRef:
        """The numbers of a row in all steps."""
        (form, *_) = row.compared if row.op in COMPARING else row.forms
        return self.rows.literal(torch.tensor(numbers[::-1] if reverse else numbers, dtype=form[2], device=form[3]))

    def _masks(self, loop: FoldedLoop, number: int, place: int, reverse: bool) -> dict[int, ValueRef]:
        """The masks that a step draws, by the rows that drop with them; drawn for all steps at once."""
        draw = loop.draw
        if draw is None:
            return {}
        whole = self.call(aten.empty.memory_format, list(draw.shape), dtype=torch.bool, device=draw.device)
        whole = self.call(aten.bernoulli_.float, whole, *draw.args, draw=draw)
        if all(row is None for row in loop.rows):
            return {}
        step = self.call(PART, self._flipped(whole) if reverse else whole, number, place)
        pieces = self.call(aten.split_with_sizes.default, step, list(draw.steps.counts))
        return dict(zip(dict(loop.drops), pieces, strict=True))

    def _dropped(self, x: ValueRef, mask: ValueRef, draw: Draw) -> ValueRef:
        """Eager's dropout of a tensor; ``mask``: its elements in the order in which ``draw`` fills memory, on a GPU in
        that of its shape."""
        if draw.op == FUSED:
            mask = self.call(aten.reshape.default, mask, list(draw.shape))
            dtype, keep = draw.operand.dtype, 1 - draw.args[0]
        else:
            order = sorted(range(len(draw.shape)), key=lambda d: (draw.stride[d], draw.shape[d] > 1), reverse=True)
            mask = self.call(aten.reshape.default, mask, [draw.shape[dim] for dim in order])
            mask = self._in_order(mask, [order.index(dim) for dim in range(len(order))])
            dtype, (keep,) = draw.dtype, draw.args
        kept = self.call(aten.div.Tensor, self.call(aten.to.dtype, mask, dtype), keep)
        return self.call(aten.mul.Tensor, x, kept)

    def _written(self, of, form, dim, begin, step, extent, squeezed, parts: ValueRef, reverse: bool) -> ValueRef:
        """A tensor after the loop that writes its parts; these with the steps in front."""
        if (step < 0) != reverse:
            parts = self._flipped(parts)
        value = self._moved(parts, dim)
        if not squeezed:
            value = self.call(aten.flatten.using_ints, value, dim, dim + 1)
        length, (shape, stride, *_) = self._shape(value)[dim], form
        begin = begin if step > 0 else begin + extent - length
        if length < shape[dim] or not torch.empty_strided(shape, stride, device="meta").is_contiguous():
            return self.call(aten.slice_scatter.default, self.value(of), value, dim, begin, begin + length)
        return self._contiguous(value)

    def _falls(self, part: tuple) -> bool:
        """Whether later parts lie before earlier ones."""
        of, _, _, step, *_ = part
        return (step < 0) != (of[0] == "of loop" and self.loops[of[1]].reverse)

    def _in_front(self, part: tuple, steps: Any, reverse: bool) -> ValueRef:
        """A tensor with all parts in front; the last one first where the loop is ``reverse``."""
        of, dim, first, step, extent, squeezed = part
        end, apart = first + step * (steps - 1), abs(step)
        if of[0] == "of loop":
            loop = self.loops[of[1]]
            begin = min(_position(loop, first), _position(loop, end))
            whole, stop = loop.whole[of[2:]], begin + apart * (steps - 1) + 1
            if apart > 1 or stop - begin != self._shape(whole)[0]:
                whole = self.call(aten.slice.Tensor, whole, 0, begin, stop, apart)
        else:
            whole = self._narrowed(self.value(of), dim, min(first, end), apart * (steps - 1) + extent)
            if apart == extent and not squeezed:
                whole = self.call(aten.unflatten.int, whole, dim, [steps, extent])
            elif apart != extent:  # gaps, or windows that overlap
                whole = self.call(aten.unfold.default, whole, dim, extent, apart)
                rank = len(self._shape(whole))
                if squeezed:
                    whole = self.call(aten.squeeze.dim, whole, -1)
                else:
                    axes = [*range(dim + 1), rank - 1, *range(dim + 1, rank - 1)]
                    whole = self._in_order(whole, axes)
            rank = len(self._shape(whole))
            whole = self._in_order(whole, [dim, *(each for each in range(rank) if each != dim)])
        return self._flipped(whole) if self._falls(part) != reverse else whole


def _position(loop: _Looped, step: Any) -> Any:
    """Where a step of a loop lies in its tensors."""
    return loop.steps - 1 - step if loop.reverse else step


def _out_of_place(call: FoldedCall) -> FoldedCall:
    """``h.add_(x)`` as ``h + x``, which it is where no other tensor has the memory; other calls as they are."""
    op, written = call.op, call.forms[-1] if call.forms else ()
    if len(call.forms) != 1 or not call.alone or call.into or op is aten.copy_.default:
        return call
    same = getattr(getattr(aten, op.overloadpacket.__name__.removesuffix("_"), None), op._overloadname, None)
    is_dense = torch.empty_strided(*written[:2], device="meta").is_contiguous()
    if same is None or same is op or schema(same).is_mutable or not (written[2].is_floating_point and is_dense):
        return call
    return call._replace(op=same, gives=0, through=())


def _given(gives: Any, made: Sequence[ValueRef], read: Sequence[ValueRef]) -> Any:
    """What a call returns."""
    if type(gives) is int:
        return made[gives] if gives >= 0 else read[-1 - gives]
    if gives is None or gives[:1] == ("constant",):
        return None if gives is None else gives[1]
    return [_given(each, made, read) for each in gives]


def _outside(loop: FoldedLoop) -> Iterator[Source]:
    """What a step reads from before the loop."""
    for row in loop.rows:
        if isinstance(row, FoldedCall):
            yield from (role for role in row.reads if role[0] not in ("local", "carry", "part of"))


def _origins(form: Folded) -> Iterator[Row]:
    for each in form.made:
        calls = each.rows if isinstance(each, FoldedLoop) else (each,)
        yield from (call.origin.row for call in calls if isinstance(call, FoldedCall | FoldedJoin))
