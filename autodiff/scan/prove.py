"""Proof that a run of bindings is a loop: bindings, where it starts, its period -> the role of every operand.

The steps of a loop call the same operators with the same literals, and each operand of a binding is, in all steps,

* *local*: what the same binding of the same step makes,
* a *carry*: what the same binding of the step before makes, or of one further back; in the first steps values from
  before the loop,
* a *constant*: one value from before the loop, or
* an *x*: in each step another value from before the loop, of one type.

Anything else is no loop: ``None``. A slice (an item of a tuple) whose place changes from step to step is an x, too, if
it is one of a constant.

Periods: the bindings of a function -> runs of them that look alike every so many bindings.

Two bindings look alike if they call the same operator with the same attributes and literals, on operands of the same
types: where a slice begins, and which item of a tuple is taken, may differ. What looks alike is compared exactly by
:mod:`autodiff.scan.prove`; a run is only where that is worth trying.

Roles of operands in a loop: what all steps read at one place -> what that is in each step.

Rows are numbered; each makes values. What rows are, bindings or recorded calls, is the caller's:
:mod:`autodiff.scan.prove` and ``bridge.capture.loops.find`` ask for the roles of theirs, and add what each knows of
values from before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tvm_ffi import StructuralKey

from autodiff.body import Binding, Body
from autodiff.ir import VARS, Call, Expr, Tuple, TupleGetItem, op_name

__all__ = ["FURTHEST", "BindingLoop", "Carry", "Constant", "Local", "PeriodicRun", "ProvenLoop", "Role", "X"]
__all__ += ["made_inside", "operands", "periodic", "place_of", "prove", "runs", "shifts", "with_operands"]

_SLICE = "relax.strided_slice"


class PeriodicRun(NamedTuple):
    """Bindings ``start`` to ``start + length`` of which each looks like the one ``period`` later, as far as there is
    one in the run."""

    start: int
    period: int
    length: int


def runs(bindings: Sequence[Binding], least: int) -> Iterator[PeriodicRun]:
    """Runs of at least ``least`` whole periods, see :func:`periodic`."""
    return periodic([_key(each.value) for each in bindings], least)


def periodic(keys: Sequence[Hashable], least: int) -> Iterator[PeriodicRun]:
    """Runs of at least ``least`` whole periods: longest first, of equally long ones the shortest period first.

    Left out are runs in a longer one whose period divides theirs. What looks alike has equal keys.
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
    """The distances between neighbours that look alike, of one binding or of some in a row: a period is the distance of
    two of which there is one in each step."""
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
    """Where at least so many true values stand in a row, and how many."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], alike.view(np.int8), [0]))))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(start, stop - start) for start, stop in pairs if stop - start >= least]


def _repeats(run: PeriodicRun, other: PeriodicRun) -> bool:
    """Whether a run lies in another one whose period divides its own."""
    inside = other.start <= run.start and run.start + run.length <= other.start + other.length
    return inside and run.period % other.period == 0


def place_of(value: Expr) -> tuple[int, ...]:
    """What may differ between values that look alike: where a slice begins and ends, or which item is taken."""
    if type(value) is TupleGetItem:
        return (value.index,)
    if op_name(value) == _SLICE:
        return tuple(int(number) for arg in value.args[2:4] for number in arg.fields)
    return ()


def _key(value: Expr) -> Hashable:
    kind = type(value)
    if kind is Call:
        attrs = None if value.attrs is None else StructuralKey(value.attrs)
        args = value.args[:]
        if op_name(value) == _SLICE:
            args = [*args[:2], *args[4:]]
        return (op_name(value) or StructuralKey(value.op), attrs, StructuralKey(value.ty), *map(_key, args))
    if kind in VARS:
        return "var", StructuralKey(value.ty)
    if kind is Tuple:
        return ("tuple", *map(_key, value.fields[:]))
    if kind is TupleGetItem:
        return "item", StructuralKey(value.ty), _key(value.tuple_value)
    return StructuralKey(value)


FURTHEST = 4
"""Steps that a loop may look back."""


class Local(NamedTuple):
    """The ``leaf``-th result of row ``row`` of the same step."""

    row: int
    leaf: int = 0


class Carry(NamedTuple):
    """Such a result of the step before; in the first step the value ``first``. Of a step further back, it is what the
    carry ``of`` was in the step before."""

    row: int
    leaf: int
    first: Any
    of: Carry | None = None


class Constant(NamedTuple):
    """A value from before the loop, one for all steps."""

    value: Any


@dataclass
class ProvenLoop:
    """A loop: ``steps`` times ``period`` rows from ``start`` on.

    Attributes:
        roles: of each row of a step, those of what it reads, in order; ``None`` for one that takes a part.
        taken: what these take, by their place in the step.
    """

    start: int
    period: int
    steps: int
    roles: list[list[Any] | None] = field(default_factory=list)
    taken: dict[int, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + self.period * self.steps

    @property
    def carries(self) -> list[Carry]:
        """Each once, in order of first use, and those that they are carries of."""
        found: dict[Carry, None] = {}
        for each in self.of_kind(Carry):
            carry: Carry | None = each
            while carry is not None:
                found.setdefault(carry)
                carry = carry.of
        return list(found)

    def of_kind(self, kind: type) -> list:
        """The roles of a kind, each once, in order of first use."""
        return list(dict.fromkeys(role for roles in self.roles for role in roles or () if isinstance(role, kind)))


def made_inside(
    read: Sequence[Any], made: Callable[[Any], tuple[int, int]], start: int, period: int
) -> Local | Carry | None:
    """The role of values, one for each step, of which the last is made in the loop; ``None`` if it has none.

    Args:
        made: the row that makes a value, before ``start`` for one from before the loop, and which result it is.
    """
    back = next((step for step, value in enumerate(read) if made(value)[0] >= start), FURTHEST + 1)
    if back > FURTHEST:
        return None
    row, leaf = made(read[back])
    if row >= start + period or any(made(value) != (row + at * period, leaf) for at, value in enumerate(read[back:])):
        return None
    role: Carry | None = None
    for value in reversed(read[:back]):
        role = Carry(row - start, leaf, value, role)
    return role or Local(row - start, leaf)


def shifts(run: PeriodicRun, most: int) -> Iterator[int]:
    """By how many rows a loop may begin later than a run: anywhere in the first two steps, as far as there is room."""
    spare = min(run.length % run.period + 1, most)
    yield from (*range(spare), *range(run.period, run.period + spare))


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
