"""Matrix products: ``relax.matmul`` → a neutral node; :mod:`bridge.compile.passes.choose_products` says how."""

from __future__ import annotations

from autodiff.ir import Call, dtype, shape
from bridge.compile.loop_ir.graph import Operand, whole
from bridge.compile.loop_ir.neutral import MatMul
from bridge.compile.translate.builder import Builder
from bridge.compile.translate.libcalls import tensor
from bridge.compile.translate.registry import register

__all__: list[str] = []


@register("relax.matmul")
def _matmul(builder: Builder, call: Call) -> Operand:
    """``NotImplemented`` for types torch has no product of."""
    result = dtype(call)
    if result == "bool" or result.startswith("uint"):
        return NotImplemented
    a, b = (builder.cast(tensor(builder, arg), result) for arg in call.args)
    out = builder.fresh(shape(call), result)
    builder.add(MatMul(a, b, out))
    return whole(out)


@register("library.biased_product")
def _biased_product(builder: Builder, call: Call) -> Operand:
    a, b, bias = (tensor(builder, arg) for arg in call.args[1:4])
    out = builder.fresh((a.shape[0], b.shape[1]), dtype(call))
    builder.add(MatMul(a, b, out, bias))
    return builder.reshape(whole(out), shape(call))
