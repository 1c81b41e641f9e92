"""Library calls and the fallback: operators that torch's kernels or TVM's legalization compute → call nodes.

Relax operators become kernels of :mod:`bridge.library` that write into given tensors; library functions (see
:mod:`autodiff.library`) allocate their results. Transposed and sliced operands are passed as strided views.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tvm import relax
from tvm.ir import GlobalVar, IRModule

from autodiff.extents import Extent
from autodiff.ir import (
    Call,
    Constant,
    Expr,
    ShapeExpr,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    build_function,
    dtype,
    extents_of,
    op_name,
    shape,
)
from bridge.base.log import channel
from bridge.compile.loop_ir.graph import Fallback, LibraryCall, Operand, Scalar, Value, whole
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


@register("relax.stack")
def _stack(builder: Builder, call: Call) -> Operand:
    if not isinstance(call.args[0], Tuple):
        return NotImplemented
    operands = [tensor(builder, field) for field in call.args[0].fields]
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    return emit(builder, call, "stack", operands, axis)


@register("relax.flip")
def _flip(builder: Builder, call: Call) -> Operand:
    """Only for symbolic extents; otherwise TVM's kernel, which serves one size."""
    if not any(isinstance(extent, Extent) for extent in shape(call)):
        return NotImplemented
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


log = channel("fallbacks")


@register("fallback")
def _fallback(builder: Builder, call: Call) -> Operand | list[Operand]:
    """Legalizes one call, and adds a node per PrimFunc. ``NotImplementedError`` if TVM cannot legalize it."""
    if any(isinstance(extent, Extent) for ty in _tensor_types(call) for extent in extents_of(ty)):
        raise NotImplementedError(f"{op_name(call)} of symbolic extents: no kernel of ours, and TVM's serves one size")
    if isinstance(call.ty, TensorType) and 0 in shape(call):  # nothing to compute, and TVM's index arithmetic divides
        return builder.dense(Scalar(0, dtype(call), shape(call)))
    params: dict[Expr, Var] = {}

    def parameter(arg: Expr) -> Expr:
        if isinstance(arg, Tuple):
            return Tuple([parameter(field) for field in arg.fields])
        if isinstance(arg, Var):
            return params.setdefault(arg, Var(f"x{len(params)}", arg.ty))
        return arg

    inner = Call(call.op, [parameter(arg) for arg in call.args], call.attrs, call.ty_args, ret_ty=call.ty)
    result = Var("y", call.ty)
    func = build_function(list(params.values()), [(result, inner)], [result])
    module = relax.transform.LegalizeOps()(IRModule({"main": func}))
    env = {var: builder.get(arg) for arg, var in params.items()}
    local = _Local(builder, module, env)
    for var, value in bindings(module["main"]):
        local.env[var] = local.bind(value, str(op_name(call)))
    (field,) = module["main"].body.body.fields
    return local.get(field)


def _tensor_types(call: Call) -> Iterator[TensorType]:
    types = [call.ty, *(arg.ty for arg in call.args if isinstance(arg, Var | Constant | Tuple))]
    while types:
        ty = types.pop()
        if isinstance(ty, TupleType):
            types += ty.fields
        elif isinstance(ty, TensorType) and ty.shape is not None:
            yield ty


class _Local:
    """The bindings of a legalized call, its variables mapped to the caller's operands."""

    def __init__(self, builder: Builder, module: IRModule, env: dict) -> None:
        self.builder = builder
        self.module = module
        self.env = env

    def get(self, expr: Expr) -> Operand | list:
        if isinstance(expr, Var):
            return self.env[expr]
        return self.builder.get(expr)

    def bind(self, value: Expr, op: str) -> Operand | list:
        if isinstance(value, Var | Constant):
            return self.get(value)
        if isinstance(value, Tuple):
            return [self.get(field) for field in value.fields]
        if isinstance(value, TupleGetItem):
            return self.get(value.tuple_value)[value.index]
        if op_name(value) != "relax.call_tir" or not isinstance(value.args[0], GlobalVar) or len(value.args) > 2:
            raise NotImplementedError(
                f"no kernel for the operator {op}: this package does not generate it and TVM's LegalizeOps left {value}"
            )
        operands = [self.builder.dense(self.get(arg)) for arg in value.args[1].fields]
        (ty,) = value.ty_args
        types = list(ty.fields) if isinstance(ty, TupleType) else [ty]
        outs = tuple(Value(op.split(".")[-1], tuple(int(n) for n in t.shape), str(t.dtype)) for t in types)
        kernel = self.builder.rules.legalized(self.module[value.args[0]])
        log.info("%s -> %s: no kernel of ours, TVM's legalization", op, ", ".join(map(str, types)))
        self.builder.add(Fallback(op, tuple(operands), outs, kernel))
        results = [whole(out) for out in outs]
        return results if isinstance(ty, TupleType) else results[0]
