"""Sequences as one tensor: the values of all steps <-> a tensor with the steps in front.

The parts that a loop reads are usually slices of one tensor, and what its steps make is usually joined to one: neither
then costs a binding per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tvm.relax import op

from autodiff.body import Binding, Body
from autodiff.ir import Expr, Tuple, TupleGetItem, Var, dtype, results, shape
from autodiff.scan.operator import is_scan, scan_of

__all__ = ["RESHAPES", "Emit", "Family", "are_masks", "family", "join", "section", "stack", "unviewed"]

Emit = Callable[[Expr, str], Var]
"""Binds a value under a name."""

RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
"""Operators that keep the elements in order."""

_MASK = "mask_"


@dataclass(frozen=True)
class Family:
    """Part ``i`` is ``base`` from ``first + i * step`` to as much further as ``extent``, along ``axis``, reshaped."""

    base: Binding
    axis: int
    extent: int
    first: int
    step: int

    @property
    def falls(self) -> bool:
        """Whether later parts lie before earlier ones."""
        return self.step < 0


def family(parts: Sequence[Binding], body: Body) -> Family | None:
    """What adjacent equal slices, or items of an equal split, are of; ``None`` for anything else."""
    found = [_slice(part, body) for part in parts]
    if None in found or len({each[:3] for each in found}) > 1:
        return None
    begins = [each[3] for each in found]
    extent, step = found[0][2], begins[1] - begins[0]
    if abs(step) != extent or any(later - one != step for one, later in pairwise(begins)):
        return None
    return Family(*found[0][:3], begins[0], step)


def _slice(part: Binding, body: Body) -> tuple[Binding, int, int, int] | None:
    """Base, axis, extent and begin of a slice along one axis, maybe reshaped."""
    part = unviewed(part)
    value = part.value
    if type(value) is TupleGetItem:
        split = body.binding(value.tuple_value)
        if split is not None and is_scan(split.value):
            return _last_part(split, value.index)
        if split is None or split.op != "relax.split":
            return None
        base, axis, before = split.reads[0], int(split.value.attrs.axis), split.value.ty.fields[: value.index]
        axis %= len(shape(base.var))
        begin = sum(int(field.shape.values[axis]) for field in before)
        return base, axis, shape(part.var)[axis], begin
    if value is None or part.op != "relax.strided_slice":
        return None
    axes, begins, _, steps = ([int(number) for number in arg.fields] for arg in value.args[1:5])
    if len(axes) != 1 or steps != [1]:
        return None
    base, axis = part.reads[0], axes[0] % len(shape(part.var))
    begin = begins[0] + (shape(base.var)[axis] if begins[0] < 0 else 0)
    return base, axis, shape(part.var)[axis], begin


def _last_part(call: Binding, index: int) -> tuple[Binding, int, int, int] | None:
    """The last carry of a scan as a part of the y that holds it after all steps."""
    scan, _ = scan_of(call.value)
    made = results(scan.function)
    for user in call.users:
        place = user.value.index if type(user.value) is TupleGetItem else 0
        if index < scan.carries <= place and made[place].same_as(made[index]):
            return user, 0, 1, 0 if scan.reverse else scan.length - 1
    return None


def unviewed(part: Binding) -> Binding:
    """What a binding is, up to its shape."""
    while part.value is not None and part.op in RESHAPES:
        (part,) = part.reads
    return part


def section(found: Family, count: int, part: Sequence[int], emit: Emit) -> Var:
    """The parts of a family as one tensor, in the order in which they lie in the base; ``part``: the shape of one."""
    name, value = found.base.name, found.base.var
    extents = shape(value)
    axis, extent = found.axis, found.extent
    begin = min(found.first, found.first + found.step * (count - 1))
    end = begin + count * extent
    if (begin, end) != (0, extents[axis]):
        value = emit(op.strided_slice(value, [axis], [begin], [end], [1]), f"{name}_section")
    if axis:
        value = _reshaped(value, (*extents[:axis], count, extent, *extents[axis + 1 :]), emit, f"{name}_steps")
        order = [axis, *(each for each in range(len(extents) + 1) if each != axis)]
        value = emit(op.permute_dims(value, order), f"{name}_steps")
    return _reshaped(value, (count, *part), emit, f"{name}_steps")


def are_masks(parts: Sequence[Binding]) -> bool:
    """Whether the parts are masks that are parameters. Only those are copied to be together: copying weights would cost
    more than a loop saves."""
    return all(each.value is None and each.name.startswith(_MASK) and dtype(each.var) == "bool" for each in parts)


def stack(parts: Sequence[Binding], emit: Emit) -> Var:
    """A copy of the parts, with the steps in front."""
    return emit(op.stack(Tuple([each.var for each in parts]), 0), "masks")


def join(whole: Var, axis: int, part: Sequence[int], emit: Emit) -> Expr:
    """``concat`` along an axis of all parts, each of shape ``part``, of a tensor with the steps in front."""
    count = shape(whole)[0]
    value = _reshaped(whole, (count, *part), emit, "joined")
    if axis:
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(part) + 1)]
        value = emit(op.permute_dims(value, order), "joined")
    return op.reshape(value, (*part[:axis], count * part[axis], *part[axis + 1 :]))


def _reshaped(value: Var, extents: Sequence[int], emit: Emit, name: str) -> Var:
    if shape(value) == tuple(extents):
        return value
    if math.prod(shape(value)) != math.prod(extents):
        raise AssertionError(f"{value.name} of shape {shape(value)} is no {tuple(extents)}")
    return emit(op.reshape(value, tuple(extents)), name)
