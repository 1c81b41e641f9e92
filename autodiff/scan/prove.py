"""Proof that a run of bindings is a loop: bindings, where it starts, its period -> the role of every operand.

The steps of a loop call the same operators with the same literals, and each operand of a binding is, in all steps,

* *local*: what the same binding of the same step makes,
* a *carry*: what the same binding of the step before makes, or of one further back; in the first steps values from
  before the loop,
* a *constant*: one value from before the loop, or
* an *x*: in each step another value from before the loop, of one type.

Anything else is no loop: ``None``. A slice (an item of a tuple) whose place changes from step to step is an x, too, if
it is one of a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tvm_ffi import StructuralKey

from autodiff.body import Binding, Body
from autodiff.ir import VARS, Call, Expr, Tuple, TupleGetItem
from autodiff.scan.period import Run, place_of

__all__ = ["Carry", "Constant", "Local", "Loop", "Role", "X", "operands", "prove", "with_operands"]


@dataclass(frozen=True)
class Local:
    """The result of binding ``index`` of the same step."""

    index: int


@dataclass(frozen=True)
class Carry:
    """The result of binding ``index`` of the step before; ``first`` in the first step.

    Of a step further back, it is what the carry ``of`` was in the step before.
    """

    index: int
    first: Binding
    of: Carry | None = None


@dataclass(frozen=True)
class Constant:
    """One value for all steps."""

    value: Binding


@dataclass(frozen=True)
class X:
    """A value for each step."""

    values: tuple[Binding, ...]


_FURTHEST = 4
"""Steps that a loop may look back."""

Role = Local | Carry | Constant | X


@dataclass
class Loop:
    """A proven loop.

    Attributes:
        start, period, steps: of the bindings.
        roles: of each binding of a step, its operands' roles in order; ``None`` for one that is an x itself.
        taken: those that are, by their index in the step.
    """

    start: int
    period: int
    steps: int
    roles: list[list[Role] | None] = field(default_factory=list)
    taken: dict[int, X] = field(default_factory=dict)

    @property
    def carries(self) -> list[Carry]:
        """Each once, in order of first use, and those that they are carries of."""
        found: dict[Carry, None] = {}
        for each in self._of(Carry):
            carry: Carry | None = each
            while carry is not None:
                found.setdefault(carry)
                carry = carry.of
        return list(found)

    @property
    def xs(self) -> list[X]:
        """Each once: those that are taken in the loop, then those from before it."""
        return list(dict.fromkeys([*self.taken.values(), *self._of(X)]))

    @property
    def constants(self) -> list[Constant]:
        """Each once, in order of first use."""
        return self._of(Constant)

    def _of(self, kind: type) -> list:
        return list(dict.fromkeys(role for roles in self.roles for role in roles or () if isinstance(role, kind)))


def prove(body: Body, run: Run, least: int) -> Loop | None:
    """The loop of a run with the fewest carries: it may begin anywhere in the first two steps; ``None`` if there is
    none of at least ``least`` steps."""
    best: Loop | None = None
    spare = run.length % run.period
    for shift in (*range(min(spare + 1, 32)), *range(run.period, run.period + min(spare + 1, 32))):
        steps = (run.length - shift) // run.period
        if steps < least or (best is not None and steps < best.steps):
            continue
        loop = _proven(body, run.start + shift, run.period, steps)
        if loop is not None and loop.carries and (best is None or len(loop.carries) < len(best.carries)):
            best = loop
    return best


def _proven(body: Body, start: int, period: int, steps: int) -> Loop | None:
    run = body.bindings[start : start + period * steps]
    place = {binding: divmod(index, period) for index, binding in enumerate(run)}
    loop = Loop(start, period, steps)
    for index in range(period):
        group = run[index::period]
        columns = list(zip(*(list(operands(each.value)) for each in group), strict=True))
        roles = []
        for column in columns:
            bound = [body.binding(operand) for operand in column]
            role = None if None in bound else _role(bound, place)
            if role is None:
                return None
            roles.append(role)
        if len({place_of(each.value) for each in group}) > 1:
            if not all(isinstance(role, Constant) for role in roles):
                return None
            loop.taken[index] = X(tuple(group))
            loop.roles.append(None)
        else:
            loop.roles.append(roles)
    return loop


def _role(read: Sequence[Binding], place: dict[Binding, tuple[int, int]]) -> Role | None:
    first = read[0]
    back = next((step for step, operand in enumerate(read) if operand in place), None)
    if back is None and all(operand is first for operand in read):
        return Constant(first)
    if any(_type(operand) != _type(first) for operand in read):
        return None
    if back is None:
        return X(tuple(read))
    _, index = place[read[back]]
    if back > _FURTHEST or not _all_at(read[back:], place, index, 0):
        return None
    role: Carry | None = None
    for operand in reversed(read[:back]):
        role = Carry(index, operand, role)
    return role or Local(index)


def _all_at(read: Sequence[Binding], place: dict[Binding, tuple[int, int]], index: int, first: int) -> bool:
    """Whether operand ``i`` is binding ``index`` of step ``first + i``."""
    return all(place.get(operand) == (first + step, index) for step, operand in enumerate(read))


def _type(binding: Binding) -> StructuralKey:
    return StructuralKey(binding.var.ty)


def operands(value: Expr) -> Iterator[Expr]:
    """The variables that a value reads, in order, as often as it does."""
    kind = type(value)
    if kind in VARS:
        yield value
    elif kind is Call:
        for arg in value.args[:]:
            yield from operands(arg)
    elif kind is Tuple:
        for each in value.fields[:]:
            yield from operands(each)
    elif kind is TupleGetItem:
        yield from operands(value.tuple_value)


def with_operands(value: Expr, given: Iterator[Expr]) -> Expr:
    """The value with these in the place of the variables that it reads, in order."""
    again = partial(with_operands, given=given)
    kind = type(value)
    if kind in VARS:
        return next(given)
    if kind is Call:
        return Call(value.op, [again(arg) for arg in value.args[:]], value.attrs, value.ty_args, ret_ty=value.ty)
    if kind is Tuple:
        return Tuple([again(each) for each in value.fields[:]])
    if kind is TupleGetItem:
        return TupleGetItem(again(value.tuple_value), value.index)
    return value
