"""Type inference: expressions whose types are not known yet -> the same with types, symbolic extents spelled one way.

TVM infers types; where operands have symbolic extents, our own rules (:mod:`autodiff.symbolic_shapes`) give the shapes
of the operators that combine extents, and every extent is written in its normal form: equal ones are equal expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tvm import ir, relax
from tvm.ir import is_prim_expr
from tvm.tirx import FloatImm

from autodiff.errors import UnknownShape
from autodiff.extents import from_tir, symbols_alive
from autodiff.ir import Call, Expr, IntImm, ShapeExpr, TensorType, Tuple, TupleGetItem, TupleType, Var, op_name
from autodiff.symbolic_shapes import SHAPES

__all__ = ["TypedBuilder", "normalizer", "reads_extents"]

_NUMBERS = (IntImm, FloatImm)


def normalizer() -> Callable[[Expr], Expr]:
    """A function that gives an expression on variables and constants its type, if it has none yet."""
    normalize = relax.BlockBuilder().normalize

    def typed(value: Expr) -> Expr:
        missing = type(value.ty) is ir.Type
        value = normalize(value)
        return _inferred(value) if missing and symbols_alive() else value

    return typed


class TypedBuilder:
    """A block builder whose bindings have such types; expressions may be nested, their parts are bound.

    Args:
        values: what the expressions are made of; if none of them reads an extent, everything goes TVM's way.
    """

    def __init__(self, builder: relax.BlockBuilder, values: Iterable[Expr]):
        self._builder = builder
        self._symbolic = symbols_alive() and any(map(reads_extents, values))
        self._bound: dict[Expr, Var] = {}

    def emit(self, value: Expr) -> Var:
        """A variable that is bound to ``value``."""
        return self._builder.emit(self.normalize(value))

    def normalize(self, value: Expr) -> Expr:
        """``value`` on variables, with its type."""
        if not self._symbolic:
            return self._builder.normalize(value)
        value = self._on_variables(value)
        missing = type(value.ty) is ir.Type
        value = self._builder.normalize(value)
        return _inferred(value) if missing else value

    def _on_variables(self, value: Expr) -> Expr:
        """The operands of a call, tuple or item are bound, in the order in which TVM would."""
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
    """Whether an expression, or a part of it that is not bound yet, has symbolic extents."""
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
    """A call with the type that extents give it; anything else has the type of its parts."""
    if not isinstance(value, Call) or not reads_extents(value):
        return value
    return Call(value.op, value.args, value.attrs, value.ty_args, ret_ty=_type(value))


def _is_static(ty: relax.Type) -> bool:
    if isinstance(ty, TupleType):
        return all(_is_static(field) for field in ty.fields)
    if not isinstance(ty, TensorType):
        return True  # of no type yet, or of one without extents
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
