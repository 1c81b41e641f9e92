"""Fallback: a Relax operator without a translation → TVM's own legalization of that one operator."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax
from tvm.ir import GlobalVar, IRModule

from autodiff.extents import Extent
from autodiff.ir import (
    Call,
    Constant,
    Expr,
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
from bridge.compile.loop_ir.graph import Fallback, Operand, Scalar, Value, whole
from bridge.compile.translate.builder import Builder
from bridge.compile.translate.registry import register

__all__: list[str] = []

log = channel("fallbacks")


@register("fallback")
def _fallback(builder: Builder, call: Call) -> Operand | list[Operand]:
    """Legalize one call and add a node per PrimFunc. ``NotImplementedError`` if TVM cannot legalize it."""
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
    """The types of what a call makes and reads."""
    types = [call.ty, *(arg.ty for arg in call.args if isinstance(arg, Var | Constant | Tuple))]
    while types:
        ty = types.pop()
        if isinstance(ty, TupleType):
            types += ty.fields
        elif isinstance(ty, TensorType) and ty.shape is not None:
            yield ty


class _Local:
    """The bindings of a legalized call, with its variables mapped to the caller's operands."""

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
