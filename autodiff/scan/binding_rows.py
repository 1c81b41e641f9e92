"""Bindings as rows: a function's bindings -> what a proof of loops asks of them (:mod:`autodiff.scan.prove`).

Two bindings are of one kind if they call the same operator with the same attributes and literals, on operands of the
same types: where a slice begins, and which item of a split is taken, may differ. Values are bindings and parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tvm_ffi import StructuralKey

from autodiff.body import Binding, Body
from autodiff.ir import VARS, Call, Expr, TensorType, Tuple, TupleGetItem, dtype, op_name, results, shape
from autodiff.scan.operator import is_scan, scan_of
from autodiff.scan.prove import Part, ProvenLoop, Rows, StepParts

__all__ = ["RESHAPES", "BindingRows", "Gathered", "operands", "unviewed", "with_operands"]

RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
"""Operators that keep the elements in order."""

_SLICE = "relax.strided_slice"

_MASK = "mask_"


class Gathered(NamedTuple):
    """A mask for each step, each a parameter. Only those are copied to be together: copying weights would cost more
    than a loop saves."""

    values: tuple[Binding, ...]


class BindingRows(Rows):
    """The bindings of a body; the form of a part is its shape."""

    def __init__(self, body: Body):
        self._body, self._place = body, {binding: (row, 0) for row, binding in enumerate(body.bindings)}
        self.kinds = [self._kind(binding) for binding in body.bindings]

    def columns(self, loop: ProvenLoop, index: int) -> list[Sequence[Binding]] | None:
        """What a binding reads; ``None`` where Relax takes an extent of 0 for another thing in a reshape."""
        group = [self._body.bindings[row] for row in loop.group(index)]
        if isinstance(group[0].var.ty, TensorType) and 0 in shape(group[0].var):
            return None
        read = [[self._body.binding(operand) for operand in operands(each.value)] for each in group]
        return None if any(None in each for each in read) else list(zip(*read, strict=True))

    def made(self, value: Binding) -> tuple[int, int]:
        return self._place.get(value, (-1, 0))

    def taken(self, row: int) -> Part | None:
        """Of a slice, or an item of a split."""
        return self._taken(self._body.bindings[row])

    def part(self, value: Binding) -> Part | None:
        """That, maybe reshaped, or the last carry of a scan as a part of the y that holds it after all steps."""
        value, extents = unviewed(value), shape(value.var) if isinstance(value.var.ty, TensorType) else None
        found = self._taken(value) or self._last_carry(value)
        return None if found is None else found._replace(form=extents)

    def is_readable(self, parts: StepParts) -> bool:
        """Parts are adjacent."""
        return abs(parts.step) == parts.extent

    def gathered(self, values: Sequence[Binding]) -> Gathered | None:
        are_masks = all(each.value is None and each.name.startswith(_MASK) and _is_bool(each) for each in values)
        return Gathered(tuple(values)) if are_masks else None

    def _taken(self, binding: Binding) -> Part | None:
        value = binding.value
        if type(value) is TupleGetItem:
            split = self._body.binding(value.tuple_value)
            if split is None or split.op != "relax.split" or not split.reads:  # of a constant
                return None
            base, axis, before = split.reads[0], int(split.value.attrs.axis), split.value.ty.fields[: value.index]
            axis %= len(shape(base.var))
            begin = sum(int(field.shape.values[axis]) for field in before)
        elif value is not None and binding.op == _SLICE:
            axes, begins, _, steps = ([int(number) for number in arg.fields] for arg in value.args[1:5])
            if len(axes) != 1 or steps != [1] or not binding.reads:
                return None
            base, axis = binding.reads[0], axes[0] % len(shape(binding.var))
            begin = begins[0] + (shape(base.var)[axis] if begins[0] < 0 else 0)
        else:
            return None
        return Part(base, axis, begin, shape(binding.var)[axis], shape(binding.var))

    def _last_carry(self, binding: Binding) -> Part | None:
        value = binding.value
        call = self._body.binding(value.tuple_value) if type(value) is TupleGetItem else None
        if call is None or not is_scan(call.value):
            return None
        scan, _ = scan_of(call.value)
        made = results(scan.function)
        for user in call.users:
            place = user.value.index if type(user.value) is TupleGetItem else 0
            if value.index < scan.carries <= place and made[place].same_as(made[value.index]):
                return Part(user, 0, 0 if scan.reverse else scan.length - 1, 1, shape(binding.var))
        return None

    def _kind(self, binding: Binding) -> Hashable:
        value, part = binding.value, self._taken(binding)
        if part is None:
            return _key(value)
        if type(value) is TupleGetItem:
            return "part", StructuralKey(value.ty), _key(value.tuple_value)
        return "part", StructuralKey(value.ty), *map(_key, (*value.args[:2], *value.args[4:]))


def _key(value: Expr) -> Hashable:
    kind = type(value)
    if kind is Call:
        attrs = None if value.attrs is None else StructuralKey(value.attrs)
        return (op_name(value) or StructuralKey(value.op), attrs, StructuralKey(value.ty), *map(_key, value.args[:]))
    if kind in VARS:
        return "var", StructuralKey(value.ty)
    if kind is Tuple:
        return ("tuple", *map(_key, value.fields[:]))
    if kind is TupleGetItem:
        return "item", value.index, StructuralKey(value.ty), _key(value.tuple_value)
    return StructuralKey(value)


def _is_bool(binding: Binding) -> bool:
    return dtype(binding.var) == "bool"


def unviewed(part: Binding) -> Binding:
    """What a binding is, up to its shape."""
    while part.value is not None and part.op in RESHAPES:
        (part,) = part.reads
    return part


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
