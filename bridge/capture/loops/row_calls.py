"""Static single assignment: the rows of a record → calls in a form in which the steps of a loop can be compared.

A write in place gives the written tensor, and each tensor that shares its memory, a new value, which later calls read.
So a call depends only on the values that it reads. Two calls of one kind are the same operator with the same constants,
on tensors with the same layouts. Calls that take a part of a tensor (``x[:, 3]``) may differ in the part's start. A
write of a part (``out[t] = h``: a view, and a copy into it) is one call.

:mod:`bridge.capture.loops.prove` proves that the steps of a loop are one function. Beside carries, constants and parts
of a tensor, a call may read a tensor that is *written* part by part: the same call of the step before has written it,
and each step writes the next part. The numbers of one call in all steps are a sequence. In the first steps autograd may
not yet track values that it tracks later, because the initial state requires no grad. The function is the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from autodiff.lazy import cached_property
from bridge.base.torch_internals import OpOverload, aten
from bridge.capture.loops.proven_loop import (
    FURTHEST,
    Carry,
    Local,
    Part,
    Producer,
    ProvenLoop,
    Role,
    StepParts,
    step_parts,
)
from bridge.capture.observation import Draw
from bridge.capture.passes.decompositions import may_raise
from bridge.capture.rows import Form, Record, Row, ValueRef, key_of, mapped, values_in, written


class NotRolledError(Exception):
    """The loops of a record cannot be rolled up; the message is the reason."""


NUMBERED = frozenset(
    [getattr(aten, name + end).Tensor for name in ("add", "sub", "mul", "div") for end in ("", "_")]
    + [aten.rsub.Scalar]
)
"""Operators on a tensor and a number that compute the same with a 0-d tensor of the number, in float32 and float64."""

COMPARING = frozenset(getattr(aten, name).Scalar for name in ("lt", "le", "gt", "ge", "eq", "ne"))
"""Operators that compare a tensor with a number as with a tensor of that number in the same dtype."""

CREATING = frozenset({aten.full.default, aten.new_full.default, aten.full_like.default, aten.scalar_tensor.default})
"""Operators whose result has one number everywhere."""

_WHOLE = 2**53
"""The bound up to which every integer is a float64."""

_NUMBERS_OF_SUMS = {torch.float32: (int, float), torch.float64: (int, float)}
_NUMBERS: dict[torch.dtype, tuple[type, ...]] = {**_NUMBERS_OF_SUMS, torch.int64: (int,)}
"""dtype -> the types of Python numbers that convert to it up to rounding."""

_NEVER = (
    aten.as_strided,
    aten.as_strided_,
    aten.set_,
    aten.resize_,
    aten._assert_async,
    aten.batch_norm,
    aten.instance_norm,
)
"""Operators that no step may have: they read or write more than their schema says, or memory outside of operands."""


class RowCall(NamedTuple):
    """A row of a record, or two rows (a view, and a copy into it).

    Attributes:
        row: the record's row, the copy of two.
        kind: equal for calls that compute the same, but for the start of a part and the number.
        reads: the values of its operands, with repetitions, then of tensors that share the memory that it writes.
        makes: the values that it makes, in order: its new results, then the new values of ``through``.
        part: the part that it takes, if it takes one.
        into: the part that it writes, if it writes one: it reads (old whole, new value of the part), makes (new whole).
        numbered: the position of its only number, which may differ between calls of one kind, in the arguments.
        through: indices among ``reads`` of tensors that get new values.
        targets: how many of these are written; the others share their memory.
        alone: whether it writes one tensor, whose memory no later reader has under another name.
    """

    row: Row
    kind: Hashable
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    part: Part | None = None
    into: Part | None = None
    numbered: int | None = None
    through: tuple[int, ...] = ()
    targets: int = 0
    alone: bool = False

    @property
    def number(self) -> int | float | None:
        """Its only number, if that may differ."""
        return None if self.numbered is None else self.row.args[self.numbered]

    def argument(self, place: int, name: str, default: Any) -> Any:
        """An argument of its operator by position or name."""
        return self.row.args[place] if len(self.row.args) > place else self.row.kwargs.get(name, default)


@dataclass
class RowCalls:
    """The calls of a record, as rows for the proof of loops; values are numbers.

    Attributes:
        rows: the calls, in order; a call that no step may have has a kind of its own.
        forms: layout of each value.
        made: producer of each value; row -1 for inputs, row -2 for literals and free tensors.
        drawn: index of a call -> its draw.
        effects: indices of calls that stay even if their results are unused.
        results: the leaves of the run's result, values for tensors.
        last: input that is written -> its last value.
    """

    rows: list[RowCall] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    made: list[Producer] = field(default_factory=list)
    drawn: dict[int, Draw] = field(default_factory=dict)
    effects: set[int] = field(default_factory=set)
    results: list[Any] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> list[Hashable]:
        """By row; equal for rows that do the same, except for the begin of a part that they take."""
        return [row.kind for row in self.rows]

    @cached_property
    def reads(self) -> list[Sequence[int]]:
        """By row, the values that it reads."""
        return [row.reads for row in self.rows]

    @cached_property
    def taken(self) -> list[Part | None]:
        """By row, the part of a value that it takes, or ``None``."""
        return [row.part for row in self.rows]

    @cached_property
    def readers(self) -> Counter[int]:
        """Value -> how often it is read."""
        return Counter([value for row in self.rows for value in row.reads] + [*self.needed])

    @property
    def needed(self) -> set[int]:
        """The values that are live after all calls."""
        return {*values_in(self.results), *self.last.values()}

    def part(self, value: int) -> Part | None:
        """The part of another value that a value is, if one call made it; else ``None``."""
        row, leaf = self.made[value]
        if row < 0:
            return None
        call = self.rows[row]
        return call.part if call.part is not None else self._item(call, leaf)

    def _item(self, call: RowCall, leaf: int) -> Part | None:
        """The part that result ``leaf`` of ``unbind``, ``chunk`` or ``split`` is, or ``None``."""
        op, of = call.row.op, call.reads[0] if call.reads else -1
        if op not in (aten.unbind.int, aten.chunk.default, aten.split.Tensor) or len(call.makes) < 2:
            return None
        whole, first = self.forms[of].shape, self.forms[call.makes[0]].shape
        dim = call.argument(1 if op is aten.unbind.int else 2, "dim", 0)
        if type(dim) is not int or any(self.forms[made].shape != first for made in call.makes):
            return None
        dim %= len(whole)
        if op is aten.unbind.int:
            return Part(of, dim, leaf, 1, True)
        return Part(of, dim, leaf * first[dim], first[dim], False)

    def columns(self, loop: ProvenLoop, index: int) -> list[Sequence[int]] | None:
        """By operand of a row of a step (of a write of a part: its new value), the values in all steps; ``None`` if no
        step may have the row."""
        numbers = loop.group(index)
        group = [self.rows[number] for number in numbers]
        if not self._draws_alike(numbers):
            return None
        if len({repr(each.number) for each in group}) > 1:
            loop.numbers[index] = tuple(each.number for each in group)
        columns = list(zip(*(each.reads for each in group), strict=True))
        if group[0].into is None:
            return columns
        written = self._written(group, loop)
        if written is None:
            return None
        loop.written[index] = written
        return columns[1:2]

    def is_own(self, loop: ProvenLoop, index: int, roles: Sequence[Role]) -> bool:
        """Whether a row writes only memory that is carried or made in the step, and that no value outside shares."""
        row = self.rows[loop.start + index]
        for place, of in enumerate(() if index in loop.written else row.through):
            role = roles[of]
            own = isinstance(role, Local) and role.row not in loop.taken
            if not own and not (isinstance(role, Carry) and place < row.targets):
                return False
        return True

    def is_whole(self, loop: ProvenLoop) -> bool:
        """Whether a loop carries a value or only draws, and autograd tracks all steps alike."""
        step = self.rows[loop.start : loop.start + loop.period]
        if not loop.carries and any(row.reads or row.makes for row in step):
            return False
        return all(self._is_followed_alike(loop, index) for index in range(loop.period))

    def _draws_alike(self, numbers: Sequence[int]) -> bool:
        """Whether rows draw nothing, or draw with one metadata."""
        return len({self.drawn.get(number) for number in numbers if self.drawn}) < 2

    def _written(self, group: Sequence[Any], loop: ProvenLoop) -> StepParts | None:
        """The parts that rows write, each into the tensor that the row of the step before made and only it reads."""
        first = group[0].reads[0]
        if self.made[first].row >= loop.start:
            return None
        if any(later.reads[0] != before.makes[0] for before, later in pairwise(group)):
            return None
        if any(self.readers[each.makes[0]] > 1 for each in group[:-1]):
            return None
        parts = step_parts([each.into._replace(of=first) for each in group])
        return None if parts is None or abs(parts.step) != parts.extent else parts

    def _is_followed_alike(self, loop: ProvenLoop, index: int) -> bool:
        """Whether autograd tracks a row's results in all steps or in none, the first steps aside."""
        forms, group = self.forms, [self.rows[number] for number in loop.group(index)]
        last = [forms[value].requires_grad for value in group[-1].makes]
        if any(forms[value].requires_grad > now for each in group for value, now in zip(each.makes, last, strict=True)):
            return False
        return all([forms[value].requires_grad for value in each.makes] == last for each in group[FURTHEST:])


def calls_of(record: Record, results: Sequence[Any], draws: Sequence[Draw]) -> RowCalls:
    """The live calls of a record.

    Args:
        results: the leaves of the run's result, values for tensors.
        draws: the run's draws.

    Raises:
        NotRolledError: a row's operands do not determine its effect.
    """
    return _alive(_Reader(record, results, draws).calls)


class _Reader:
    def __init__(self, record: Record, results: Sequence[Any], draws: Sequence[Draw]):
        self.record, self.draws, self.calls = record, draws, RowCalls()
        self._first_computed = next((index for index, draw in enumerate(draws) if draw.is_computed), len(draws))
        self._now: dict[int, int] = {}  # the record's values → their current SSA values
        self._sharing: dict[int, list[int]] = {}
        inputs = [*range(record.inputs), *record.free]
        self._of_inputs = {record.memory[number] for number in inputs}
        never = len(record.rows)
        self._last_read = dict.fromkeys([*inputs, *values_in(results)], never)
        for index, row in reversed(list(enumerate(record.rows))):
            for number in values_in((row.args, row.kwargs)):
                self._last_read.setdefault(number, index)
        for number in range(record.inputs):
            self._new(number, Producer(-1, number))
        for number in (*record.literals, *record.free):
            self._new(number, Producer(-2, number))
        for index, row in enumerate(record.rows):
            self._row(index, row)
        calls, now = self.calls, self._now
        calls.results = [ValueRef(now[each.number]) if isinstance(each, ValueRef) else each for each in results]
        calls.last = {number: now[number] for number in inputs if calls.made[now[number]].row >= 0}

    def _new(self, number: int, made: Producer) -> int:
        self._sharing.setdefault(self.record.memory[number], []).append(number)
        self._now[number] = value = self._value(self.record.forms[number], made)
        return value

    def _value(self, form: Form, made: Producer) -> int:
        self.calls.forms.append(form)
        self.calls.made.append(made)
        return len(self.calls.forms) - 1

    def _row(self, index: int, row: Row) -> None:
        record, calls = self.record, self.calls
        operands = list(values_in((row.args, row.kwargs)))
        writes = list(values_in(written(row)))
        known = {number: place for place, number in reversed(list(enumerate(operands)))}
        results = list(values_in(row.results))
        fresh = [number for number in dict.fromkeys(results) if number not in self._now]
        draws = row.draws[1] - row.draws[0]
        effect = not results or any(name in str(row.op) for name in ("batch_norm", "instance_norm"))  # statistics
        if not (fresh or writes or draws or effect):
            return  # it returns its operands
        here = len(calls.rows)
        reads = [self._now[number] for number in operands]
        makes = [self._new(number, Producer(here, leaf)) for leaf, number in enumerate(fresh)]
        through, targets, owned = [], 0, False
        if writes:
            targets_of = list(dict.fromkeys(writes))
            memory = dict.fromkeys(record.memory[number] for number in targets_of)
            owned = not self._of_inputs.isdisjoint(memory)
            alive = [n for each in memory for n in self._sharing.get(each, ()) if self._last_read.get(n, -1) > index]
            others = [number for number in alive if number not in targets_of and number not in fresh]
            targets_of = [number for number in targets_of if number in alive]
            targets = len(targets_of)
            follows = row.grad and any(calls.forms[value].requires_grad for value in reads)
            seen = row.grad and any(calls.forms[self._now[number]].requires_grad for number in writes)
            tracked = any(calls.forms[self._now[number]].requires_grad for number in (*targets_of, *others))
            owned |= tracked and not seen  # autograd does not see the write
            for number in (*targets_of, *others):
                through.append(known[number] if number in known else len(reads))
                if number not in known:
                    reads.append(self._now[number])
                form = calls.forms[self._now[number]]
                form = form._replace(requires_grad=form.requires_grad or (follows and form.dtype.is_floating_point))
                self._now[number] = value = self._value(form, Producer(here, len(makes)))
                makes.append(value)
            for each in memory:  # forgets dead values
                self._sharing[each] = [n for n in self._sharing[each] if self._last_read.get(n, -1) > index]
        if draws > 1:
            raise NotRolledError(f"{row.op} draws more than once")
        if draws:
            calls.drawn[here] = self.draws[row.draws[0]]
        if effect:
            calls.effects.add(here)
        places = {number: -1 - place for number, place in known.items()}
        places.update((number, leaf) for leaf, number in enumerate(fresh))
        gives = mapped(row.results, ValueRef, lambda each: ValueRef(places[each.number]))
        if not self._joined_write(row, reads, makes, tuple(through), owned or effect):
            self._add(row, reads, makes, gives, tuple(through), targets, owned or effect)

    def _add(self, row, reads, makes, gives, through, targets, barred) -> None:
        calls = self.calls
        part = _part_of(row, reads, makes, calls) if not through else None
        args, numbered = row.args, None
        if part is not None:
            constants = part[1:2] + part[3:]
        else:
            if (numbered := _numbered(row, [calls.forms[value] for value in reads])) is not None:
                args = (*args[:numbered], None, *args[numbered + 1 :])
            try:
                constants = key_of((args, row.kwargs), ValueRef, lambda _: ValueRef)
            except TypeError as error:
                raise NotRolledError(str(error)) from None
        kind = row.op, constants, numbered, part is None, row.grad, repr(gives), through, targets
        kind += tuple([calls.forms[value].layout for value in (*reads, *makes)])
        draw = calls.drawn.get(len(calls.rows))
        if draw is not None:
            kind += (row.draws[0] >= self._first_computed,)
        draws_otherwise = draw is not None and row.op is not aten.dropout.default and not draw.is_computed
        if barred or _is_barred(row) or draws_otherwise:
            kind = object()
        alone = targets == len(through) == 1 and not barred
        calls.rows.append(RowCall(row, kind, tuple(reads), tuple(makes), part, None, numbered, through, targets, alone))

    def _joined_write(self, row: Row, reads: list[int], makes: list[int], through: tuple, barred: bool) -> bool:
        """Joins the last call, a view, and this row, a copy into it, to ``whole[index] = value`` → whether it did.
        Later rows must read only the whole, of all tensors in its memory."""
        calls, last = self.calls, self.calls.rows[-1] if self.calls.rows else None
        if row.op is not aten.copy_.default or last is None or last.part is None or barred or len(reads) != 3:
            return False
        if through != (2,) or last.makes != (reads[0],) or last.part.of != reads[2]:
            return False
        view, value, whole = (calls.forms[each] for each in reads)
        if (
            row.kwargs
            or len(row.args) != 2
            or (value.shape, value.dtype, value.device) != (view.shape, view.dtype, view.device)
        ):
            return False
        (made,) = makes
        here = len(calls.rows) - 1
        calls.rows.pop()
        calls.made[made] = Producer(here, 0)
        part = last.part
        kind = "into", part[1:2] + part[3:], whole.layout, value.layout, row.grad
        calls.rows.append(RowCall(row, kind, (part.of, reads[1]), (made,), into=part, through=(0,), targets=1))
        return True


def _alive(calls: RowCalls) -> RowCalls:
    """Dead code elimination: keeps calls that the results need, that draw, have an effect or may raise an error.

    An unused value has no gradient in eager. In a loop it would have the gradient zero in the steps that do not use it,
    and zero times an infinite factor is nan. So a step with fewer live rows (the last one, whose state is unused)
    differs from the others. So does a step that no gradient reaches, because later rows only read it without one.
    Dropout of a dead value only draws. A call that is live only because it may raise an error gets a kind of its own,
    so that it is in no step.
    """
    needed, alive, for_errors = calls.needed, [False] * len(calls.rows), set()
    followed, stopped = {value for value in needed if calls.forms[value].requires_grad}, set()
    for number in range(len(calls.rows) - 1, -1, -1):
        row = calls.rows[number]
        drops = row.row.op is aten.dropout.default
        tracked = [value for value in row.makes if calls.forms[value].requires_grad]
        if not followed.isdisjoint(tracked):
            followed.update(row.reads)
        elif tracked:
            stopped.add(number)
        if number in calls.effects or (number in calls.drawn and not drops) or not needed.isdisjoint(row.makes):
            alive[number] = True
            needed.update(row.reads)
        elif row.makes and may_raise(row.row.op, calls.forms[row.makes[0]].dtype):
            alive[number] = True
            for_errors.add(number)
            needed.update(row.reads)
    left = replace(calls, rows=[], drawn={}, effects=set(), made=list(calls.made))
    for number, row in enumerate(calls.rows):
        draw, here = calls.drawn.get(number), len(left.rows)
        if not alive[number] and draw is not None and not needed.issuperset(row.reads):
            row = RowCall(row.row, draw)
        elif not alive[number] and draw is None:
            continue
        elif number in for_errors:
            row = row._replace(kind=object())
        elif number in stopped:
            row = row._replace(kind=(row.kind, "stopped"))
        if draw is not None:
            left.drawn[here] = draw
        if number in calls.effects:
            left.effects.add(here)
        for leaf, value in enumerate(row.makes):
            left.made[value] = Producer(here, leaf)
        left.rows.append(row)
    return left


def _is_barred(row: Row) -> bool:
    """Whether no step may have a row."""
    op = row.op
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op.overloadpacket in _NEVER:
        return True
    return torch.Tag.dynamic_output_shape in op.tags


def _numbered(row: Row, reads: Sequence[Form]) -> int | None:
    """The position of a number among the arguments that may differ between calls of a kind, or ``None``."""
    args, kinds = row.args, tuple[type, ...]()
    if row.op in CREATING:
        kinds = int, float
    elif (row.op in NUMBERED or row.op in COMPARING) and len(args) == 2 and not row.kwargs and len(reads) == 1:
        kinds = (_NUMBERS if row.op in COMPARING else _NUMBERS_OF_SUMS).get(reads[0].dtype, ())
    places = [place for place, arg in enumerate(args) if type(arg) in kinds]
    if len(places) != 1 or not abs(args[places[0]]) < _WHOLE or math.isnan(args[places[0]]):
        return None
    return places[0]


def _part_of(row: Row, reads: Sequence[int], makes: Sequence[int], calls: RowCalls) -> Part | None:
    """The part of its first operand that a row takes (``select``, ``narrow``, ``slice``), or ``None``."""
    if row.op not in (aten.select.int, aten.slice.Tensor, aten.narrow.default) or row.kwargs or len(reads) != 1:
        return None
    args, shape = row.args[1:], calls.forms[reads[0]].shape
    if not shape or any(type(each) is not int and each is not None for each in args):
        return None
    dim = (args[0] if args else 0) % len(shape)
    made = calls.forms[makes[0]].shape
    if row.op is aten.select.int:
        return Part(reads[0], dim, args[1] % shape[dim], 1, True)
    begin = args[1] if len(args) > 1 and args[1] is not None else 0
    if row.op is aten.slice.Tensor and len(args) > 3 and args[3] != 1:
        return None
    begin = min(max(begin + shape[dim] if begin < 0 else begin, 0), shape[dim])
    if not made[dim] or made == shape:
        return None
    return Part(reads[0], dim, begin, made[dim], False)
