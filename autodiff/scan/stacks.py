"""Sequences as one tensor: the values of all steps <-> a tensor with the steps in front.

The parts that a loop reads are usually slices of one tensor, and what its steps make is usually joined to one: neither
then costs a binding per step.

Sums over the steps of a loop: gradients that every step adds to -> one product, or sum, over all steps.

``sum over t of a_t' b_t`` is the product of all rows ``a`` and all rows ``b``, one below the other; a sum of rows
likewise. What is needed for that beyond what is at hand for all steps leaves the loop as a tensor with the steps in
front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tvm.relax import op

from autodiff.body import Binding, Body, Scope
from autodiff.ir import Expr, Function, Tuple, TupleGetItem, Var, bindings, dtype, op_name, results, shape
from autodiff.scan.operator import is_scan, scan_of

__all__ = ["RESHAPES", "Emit", "Family", "Sums", "are_masks", "family", "join", "plan_sums", "section", "stack"]
__all__ += ["unviewed"]

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


@dataclass
class Sums:
    """How gradients are summed after the loop.

    Attributes:
        of: the gradients, by their variable in a step.
        stacked: variables of a step that leave the loop for that.
        read: those, and what is at hand, that the sums read.
    """

    definitions: Mapping[Var, Expr]
    of: set[Expr] = field(default_factory=set)
    stacked: list[Var] = field(default_factory=list)
    read: set[Var] = field(default_factory=set)

    def emit(self, value: Expr, whole: Mapping[Var, Expr], scope: Scope) -> Var:
        """The sum of a gradient over all steps; ``whole``: what is read, with the steps in front."""
        call = self.definitions[value]
        match op_name(call):
            case "relax.permute_dims":
                made = op.permute_dims(self.emit(call.args[0], whole, scope))
            case "relax.add":
                made = op.add(*(self.emit(arg, whole, scope) for arg in call.args))
            case "relax.reshape":
                made = op.reshape(self.emit(call.args[0], whole, scope), shape(call))
            case "relax.sum":
                axes = [0, *(int(axis) + 1 for axis in _axes(call))]
                made = op.sum(whole[call.args[0]], axes, False)
            case _:
                left = _columns(*self._factor(call.args[0]), whole, scope, rows_last=True)
                right = _columns(*self._factor(call.args[1]), whole, scope, rows_last=False)
                made = op.matmul(left, right, call.attrs.out_dtype)
        return scope.emit(made, "sum")

    def _factor(self, value: Var) -> tuple[Var, bool]:
        """What a factor is, and whether transposed."""
        definition = self.definitions.get(value)
        if op_name(definition) == "relax.permute_dims" and len(shape(value)) == 2:
            return definition.args[0], True
        return value, False

    def factors(self, value: Expr, any_sum: bool = False) -> list[Var] | None:
        """The factors of all products that a gradient is made of, and what its sums of rows read; ``None`` if it is
        made of anything else. ``any_sum``: also of sums whose rows would leave the loop for nothing else."""
        call = self.definitions.get(value) if isinstance(value, Var) else None
        name = op_name(call)
        if name == "relax.matmul" and all(len(shape(arg)) == 2 for arg in call.args):
            return [self._factor(arg)[0] for arg in call.args]
        if name == "relax.sum" and isinstance(call.args[0], Var) and not call.attrs.keepdims:
            return [call.args[0]] if any_sum or call.args[0] in self.read else None
        if name in ("relax.reshape", "relax.add") or (name == "relax.permute_dims" and len(shape(value)) == 2):
            if name == "relax.add" and len({tuple(shape(arg)) for arg in (value, *call.args)}) > 1:
                return None
            args = call.args[:] if name == "relax.add" else call.args[:1]
            parts = [self.factors(arg, any_sum) for arg in args]
            return None if None in parts else [each for part in parts for each in part]
        return None


def plan_sums(step: Function, gradients: Sequence[Expr], at_hand: Sequence[Var], spare: int = 0) -> Sums:
    """What is summed after the loop.

    Args:
        step: the backward of one step.
        gradients: those results of it that are to be summed.
        at_hand: its parameters that are at hand for all steps. Other parameters are no factors.
        spare: elements of a step that may leave the loop for sums of rows alone.
    """
    sums = Sums(dict(bindings(step)))
    others = {param for param in step.params if param not in at_hand}
    sums.read.update(at_hand)
    for any_sum in (False, False, True):  # what leaves the loop for a product is at hand for a sum
        for gradient in gradients:
            found = sums.factors(gradient, any_sum)
            if gradient in sums.of or found is None or any(each in others for each in found):
                continue
            leaving = [each for each in dict.fromkeys(found) if each not in sums.read]
            elements = sum(math.prod(shape(each)) for each in leaving) if any_sum else 0
            if elements > spare:
                continue
            spare -= elements
            sums.of.add(gradient)
            sums.stacked += leaving
            sums.read.update(leaving)
    return sums


def _axes(call: Expr) -> list[int]:
    rank = len(shape(call.args[0]))
    return list(range(rank)) if call.attrs.axis is None else [int(axis) % rank for axis in call.attrs.axis]


def _columns(factor: Var, transposed: bool, whole: Mapping[Var, Expr], scope: Scope, rows_last: bool) -> Var:
    """A factor of all steps: the axis that is summed over, and the steps, are one; last where ``rows_last``."""
    value = whole[factor]
    steps, first, second = shape(value)
    summed_last = rows_last != transposed  # of the two axes of a step's factor
    if summed_last:  # [steps, kept, summed]
        value = scope.emit(op.permute_dims(value, [1, 0, 2]), "factor")
        value = scope.emit(op.reshape(value, (first, steps * second)), "factor")
        return value if rows_last else scope.emit(op.permute_dims(value), "factor")
    value = scope.emit(op.reshape(value, (steps * first, second)), "factor")
    return scope.emit(op.permute_dims(value), "factor") if rows_last else value
