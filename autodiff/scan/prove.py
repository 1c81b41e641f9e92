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
from dataclasses import dataclass
from functools import partial

from tvm_ffi import StructuralKey

from autodiff.body import Binding, Body
from autodiff.ir import VARS, Call, Expr, Tuple, TupleGetItem
from autodiff.scan.period import PeriodicRun, place_of
from autodiff.scan.roles import Carry, Constant, Local, ProvenLoop, made_inside, shifts

__all__ = ["BindingLoop", "Role", "X", "operands", "prove", "with_operands"]

_SHIFTS = 32


@dataclass(frozen=True)
class X:
    """A value for each step."""

    values: tuple[Binding, ...]


Role = Local | Carry | Constant | X


class BindingLoop(ProvenLoop):
    """A proven loop; each row is a binding, which has one result."""

    @property
    def xs(self) -> list[X]:
        """Each once: those that are taken in the loop, then those from before it."""
        return list(dict.fromkeys([*self.taken.values(), *self.of_kind(X)]))


def prove(body: Body, run: PeriodicRun, least: int) -> BindingLoop | None:
    """The loop of a run with the fewest carries: it may begin anywhere in the first two steps; ``None`` if there is
    none of at least ``least`` steps."""
    best: BindingLoop | None = None
    for shift in shifts(run, _SHIFTS):
        steps = (run.length - shift) // run.period
        if steps < least or (best is not None and steps < best.steps):
            continue
        loop = _proven(body, run.start + shift, run.period, steps)
        if loop is not None and loop.carries and (best is None or len(loop.carries) < len(best.carries)):
            best = loop
    return best


def _proven(body: Body, start: int, period: int, steps: int) -> BindingLoop | None:
    run = body.bindings[start : start + period * steps]
    place = {binding: (index, 0) for index, binding in enumerate(run)}
    loop = BindingLoop(start, period, steps)
    for index in range(period):
        group = run[index::period]
        columns = list(zip(*(list(operands(each.value)) for each in group), strict=True))
        roles = []
        for column in columns:
            bound = [body.binding(operand) for operand in column]
            role = None if None in bound else _role(bound, place, period)
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


_OUTSIDE = (-1, 0)


def _role(read: Sequence[Binding], place: dict[Binding, tuple[int, int]], period: int) -> Role | None:
    first, is_outside = read[0], place.keys().isdisjoint(read)
    if is_outside and all(operand is first for operand in read):
        return Constant(first)
    if any(_type(operand) != _type(first) for operand in read):
        return None
    return X(tuple(read)) if is_outside else made_inside(read, lambda each: place.get(each, _OUTSIDE), 0, period)


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
