"""Library calls: operators that torch's kernels compute → call nodes.

Relax operators become kernels of :mod:`bridge.library` that write into given tensors; library functions (see
:mod:`autodiff.library`) allocate their results. Transposed and sliced operands are passed as strided views.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from autodiff.ir import Call, Expr, ShapeExpr, TensorType, Tuple, TupleType, Var, dtype, extents_of, shape
from bridge.compile.loop_ir.graph import LibraryCall, Operand, Scalar, whole
from bridge.compile.translate.builder import Builder, number, numbers, register
from bridge.library import FUNCTIONS, TensorAt, TensorsAt

__all__ = ["emit", "tensor"]


def tensor(builder: Builder, expr: Expr) -> Operand:
    """The operand of a tensor argument; a literal becomes a tensor."""
    operand = builder.get(expr)
    return builder.dense(operand) if isinstance(operand, Scalar) else operand


def emit(builder: Builder, call: Call, name: str, operands: list[Operand], *attrs: Any) -> Operand:
    """The result of a Relax call, by a kernel that writes into it."""
    out = builder.fresh(shape(call), dtype(call))
    builder.add(LibraryCall(name, tuple(operands), (out,), attrs))
    return whole(out)


@register("relax.flip")
def _flip(builder: Builder, call: Call) -> Operand:
    return emit(builder, call, "flip", [tensor(builder, call.args[0])], int(call.attrs.axis))


@register("relax.cumsum")
def _cumsum(builder: Builder, call: Call) -> Operand:
    if call.attrs.axis is None:
        return NotImplemented
    axis, exclusive = int(call.attrs.axis), bool(call.attrs.exclusive)
    return emit(builder, call, "cumsum", [tensor(builder, call.args[0])], axis, exclusive)


@register("relax.gather_elements")
def _gather_elements(builder: Builder, call: Call) -> Operand:
    axis = int(call.attrs.axis)
    x, index = tensor(builder, call.args[0]), builder.cast(tensor(builder, call.args[1]), "int64")
    return emit(builder, call, "gather", [x, index], axis)


@register("relax.scatter_elements")
def _scatter_elements(builder: Builder, call: Call) -> Operand:
    axis, reduction = int(call.attrs.axis), str(call.attrs.reduction)
    if reduction not in ("update", "add"):
        return NotImplemented
    x, index, source = (tensor(builder, arg) for arg in call.args)
    index = builder.cast(index, "int64")
    return emit(builder, call, "scatter_add" if reduction == "add" else "scatter", [x, index, source], axis)


def _library_function(builder: Builder, call: Call, name: str) -> Operand | list[Operand]:
    """``library.<name>``: tensor arguments become the node's operands, other arguments its attributes."""
    operands: list[Operand] = []
    arguments = tuple(_argument(builder, arg, operands) for arg in call.args[1:])
    types = call.ty.fields if isinstance(call.ty, TupleType) else [call.ty]
    outs = [builder.fresh(extents_of(ty), str(ty.dtype)) for ty in types]
    builder.add(LibraryCall(name, tuple(operands), tuple(outs), arguments, allocates=True))
    results = [whole(out) for out in outs]
    return results if isinstance(call.ty, TupleType) else results[0]


def _argument(builder: Builder, arg: Expr, operands: list[Operand]) -> Any:
    """One argument in the form of :func:`bridge.library.invoke`; appends tensors to ``operands``."""
    if (isinstance(arg, Var) and isinstance(arg.ty, TupleType)) or isinstance(arg, Tuple):
        fields = [builder.dense(field) if isinstance(field, Scalar) else field for field in builder.get(arg)]
        operands.extend(fields)
        return TensorsAt(len(operands) - len(fields), len(fields))
    if isinstance(arg.ty, TensorType):
        operands.append(tensor(builder, arg))
        return TensorAt(len(operands) - 1)
    if isinstance(arg, ShapeExpr):
        return tuple(numbers(arg))
    if hasattr(arg, "value") and isinstance(arg.value, str):
        return str(arg.value)
    return number(arg)


for _name in FUNCTIONS:
    register(f"library.{_name}")(partial(_library_function, name=_name))
