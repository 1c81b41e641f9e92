"""Type inference: expressions without types -> the same with types, symbolic extents in normal form.

TVM infers types; where operands have symbolic extents, the rules of this module give the shapes of operators that
combine extents, and every extent is written in its normal form: equal extents are equal expressions.

Shape rules: a call of operands with symbolic extents -> the shape of its result.
TVM gives no shape where it cannot prove two extents equal, writes slices as conditions on signs, and takes extents for
equal without a proof. The rules compare extents, and a comparison that differs between sizes adds a guard to the scope.
Operators without a rule have the shape that TVM infers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tvm import ir, relax
from tvm.ir import is_prim_expr
from tvm.tirx import FloatImm

from autodiff.errors import UnknownShape
from autodiff.extents import Dim, Slice, broadcast, from_tir, maximum, slice_of, symbols_alive
from autodiff.ir import (
    Call,
    Expr,
    IntImm,
    ShapeExpr,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    extents_of,
    op_name,
    shape,
)
from autodiff.ops import having

Shape = tuple[Dim, ...]

SHAPES: dict[str, Callable[[Call], Sequence]] = {}
"""Operator name -> rule: a call -> the shape of its result, or the shapes of its results."""


def _shape_of(*names: str) -> Callable:
    def add(rule: Callable[[Call], Sequence]) -> Callable[[Call], Sequence]:
        SHAPES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _equal(a: Dim, b: Dim) -> None:
    if a != b:
        raise ValueError(f"wanted equal extents, got {a} and {b}")


@_shape_of(*having("elementwise"))
def _elementwise(call: Call) -> Shape:
    return broadcast([shape(arg) for arg in call.args if isinstance(arg.ty, TensorType)])


@_shape_of("relax.squeeze")
def _squeeze(call: Call) -> Shape:
    extents, axes = shape(call.args[0]), call.attrs.axis
    if axes is None:
        return tuple([extent for extent in extents if extent != 1])
    dropped = {int(axis) % len(extents) for axis in axes}
    for axis in dropped:
        _equal(extents[axis], 1)
    return tuple([extent for axis, extent in enumerate(extents) if axis not in dropped])


@_shape_of("relax.reshape", "relax.flatten", "relax.nn.batch_flatten", "relax.expand_dims")
def _same_elements(call: Call) -> Shape:
    extents = extents_of(call.ty)
    _equal(math.prod(shape(call.args[0])), math.prod(extents))
    return extents


@_shape_of("relax.broadcast_to")
def _broadcast_to(call: Call) -> Shape:
    source, target = shape(call.args[0]), extents_of(call.ty)
    for extent, wanted in zip(broadcast([source, target]), target, strict=True):
        _equal(extent, wanted)
    return target


@_shape_of("relax.matmul")
def _matmul(call: Call) -> Shape:
    a, b = (shape(arg) for arg in call.args)
    _equal(a[-1], b[-2] if len(b) > 1 else b[-1])
    return (*broadcast([a[:-2], b[:-2]]), *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


@_shape_of("relax.concat")
def _concat(call: Call) -> Shape:
    first, *others = (extents_of(field) for field in call.args[0].ty.fields)
    axis = int(call.attrs.axis or 0) % len(first)
    extents = list(first)
    for other in others:
        for each, (extent, wanted) in enumerate(zip(first, other, strict=True)):
            if each != axis:
                _equal(extent, wanted)
        extents[axis] = extents[axis] + other[axis]
    return tuple(extents)


@_shape_of("relax.strided_slice")
def _strided_slice(call: Call) -> Shape:
    extents = list(shape(call.args[0]))
    for axis, cut in slices(call):
        extents[axis] = cut.length
    return tuple(extents)


def slices(call: Call) -> list[tuple[int, Slice]]:
    """The axes that a ``relax.strided_slice`` cuts, and the slice of each."""
    x, axes, begins, ends, *strides = call.args
    steps = [int(stride) for stride in strides[0].fields] if strides else [1] * len(axes.fields)
    found = []
    for axis, begin, end, step in zip(axes.fields, begins.fields, ends.fields, steps, strict=True):
        begin, end, axis = from_tir(begin), from_tir(end), int(axis) % len(shape(x))
        inbound = bool(call.attrs.assume_inbound) and step > 0
        cut = Slice(begin, (end - begin + step - 1) // step, step) if inbound else None
        found.append((axis, cut or slice_of(begin, end, step, shape(x)[axis])))
    return found


@_shape_of("relax.gather_elements", "relax.scatter_elements")
def _along_an_axis(call: Call) -> Shape:
    """TVM's shape, after the check that indices are at most as wide as the data, except along the axis."""
    x, indices = shape(call.args[0]), shape(call.args[1])
    for axis, (extent, wanted) in enumerate(zip(x, indices, strict=True)):
        if axis != int(call.attrs.axis) % len(x) and wanted > extent:
            raise ValueError(f"wanted indices of at most {extent} along axis {axis}, got {wanted}")
    for updates in call.args[2:]:
        for extent, wanted in zip(shape(updates), indices, strict=True):
            _equal(extent, wanted)
    return extents_of(call.ty)


@_shape_of("relax.split")
def _split(call: Call) -> list[Shape]:
    extents = shape(call.args[0])
    axis = int(call.attrs.axis) % len(extents)
    extent, sections = extents[axis], call.attrs.indices_or_sections
    if isinstance(sections, IntImm):
        count = int(sections)
        size = extent // count if extent % count == 0 else (extent + count - 1) // count
        ends = [size * (index + 1) for index in range(count - 1)]
    else:
        ends = [slice_of(0, from_tir(end), 1, extent).length for end in sections]
    parts = [end - begin for begin, end in zip([0, *ends], [*ends, extent], strict=True)]
    return [(*extents[:axis], part, *extents[axis + 1 :]) for part in parts]


@_shape_of("relax.arange")
def _arange(call: Call) -> Shape:
    start, stop, step = (from_tir(bound) for bound in call.args)
    length = (stop - start + step - 1) // step
    return (maximum(length, 0),)


_NUMBERS = (IntImm, FloatImm)


def normalizer() -> Callable[[Expr], Expr]:
    """A function that infers the type of an expression on variables and constants, if it has none yet."""
    normalize = relax.BlockBuilder().normalize

    def typed(value: Expr) -> Expr:
        missing = type(value.ty) is ir.Type
        value = normalize(value)
        return _inferred(value) if missing and symbols_alive() else value

    return typed


class TypedBuilder:
    """A block builder that gives bindings types with normal-form extents, and binds the parts of nested expressions.

    Args:
        values: the operands of the expressions; if none has symbolic extents, TVM infers all types.
    """

    def __init__(self, builder: relax.BlockBuilder, values: Iterable[Expr]):
        self._builder = builder
        self._symbolic = symbols_alive() and any(map(reads_extents, values))
        self._bound: dict[Expr, Var] = {}

    def emit(self, value: Expr) -> Var:
        """A new variable bound to ``value``."""
        return self._builder.emit(self.normalize(value))

    def normalize(self, value: Expr) -> Expr:
        """``value`` with its nested operands bound to variables, and with its type."""
        if not self._symbolic:
            return self._builder.normalize(value)
        value = self._on_variables(value)
        missing = type(value.ty) is ir.Type
        value = self._builder.normalize(value)
        return _inferred(value) if missing else value

    def _on_variables(self, value: Expr) -> Expr:
        """Binds the operands of a call, tuple or item, in TVM's order."""
        if isinstance(value, Call):
            args = list(value.args)
            new = [self._leaf(arg) for arg in args]
            if any(one is not other for one, other in zip(args, new, strict=True)):
                return Call(value.op, new, value.attrs, value.ty_args)
            return value
        if isinstance(value, Tuple):
            return self._leaf(value)
        if isinstance(value, TupleGetItem):
            return TupleGetItem(self._leaf(value.tuple_value), value.index)
        return value

    def _leaf(self, arg: Expr) -> Expr:
        """An operand; a call or an item is bound, each object once."""
        if isinstance(arg, Tuple):
            return Tuple([self._leaf(field) for field in arg.fields])
        if not isinstance(arg, Call | TupleGetItem):
            return arg
        if arg not in self._bound:
            self._bound[arg] = self.emit(arg)
        return self._bound[arg]


def reads_extents(value: Expr) -> bool:
    """Whether an expression, or an unbound part of it, has symbolic extents."""
    if isinstance(value, Call):
        return any(reads_extents(arg) for arg in value.args) or not _is_static(value.ty)
    if isinstance(value, Tuple):
        return any(reads_extents(field) for field in value.fields)
    if isinstance(value, TupleGetItem):
        return reads_extents(value.tuple_value)
    if isinstance(value, ShapeExpr):
        return any(reads_extents(extent) for extent in value.values)
    return not _is_static(value.ty) or (is_prim_expr(value) and not isinstance(value, _NUMBERS))


def _inferred(value: Expr) -> Expr:
    """A call with the type by the shape rules; anything else unchanged."""
    if not isinstance(value, Call) or not reads_extents(value):
        return value
    return Call(value.op, value.args, value.attrs, value.ty_args, ret_ty=_type(value))


def _is_static(ty: relax.Type) -> bool:
    if isinstance(ty, TupleType):
        return all(_is_static(field) for field in ty.fields)
    if not isinstance(ty, TensorType):
        return True  # no type yet, or a type without extents
    return isinstance(ty.shape, ShapeExpr) and all(type(extent) is IntImm for extent in ty.shape.values)


def _type(call: Call) -> relax.Type:
    rule = SHAPES.get(op_name(call))
    if rule is None:
        return _spelled(call.ty, call)
    try:
        shapes = rule(call)
    except ValueError as error:
        raise UnknownShape(op_name(call), f"of operands {_operands(call)}: {error}") from error
    if isinstance(call.ty, TupleType):
        pairs = zip(shapes, call.ty.fields, strict=True)
        return TupleType([TensorType(extents, str(field.dtype)) for extents, field in pairs])
    return TensorType(shapes, str(call.ty.dtype))


def _spelled(ty: relax.Type, call: Call) -> relax.Type:
    """TVM's type with its extents in normal form."""
    if isinstance(ty, TupleType):
        return TupleType([_spelled(field, call) for field in ty.fields])
    if not isinstance(ty, TensorType):
        return ty
    if not isinstance(ty.shape, ShapeExpr):
        raise UnknownShape(op_name(call) or str(call.op), f"of operands {_operands(call)} TVM infers {ty}")
    try:
        return TensorType([from_tir(extent) for extent in ty.shape.values], str(ty.dtype))
    except ValueError as error:
        raise UnknownShape(op_name(call) or str(call.op), f"of operands {_operands(call)}: {error}") from error


def _operands(call: Call) -> str:
    return ", ".join(str(arg.ty) for arg in call.args)
