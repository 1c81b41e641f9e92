"""Gradients of library functions; their calling conventions are tabulated in :mod:`autodiff.library`."""

from __future__ import annotations

from collections.abc import Collection

from tvm import relax

from autodiff.gradients.registry import Emit, library_gradient, refuses
from autodiff.ir import Call, Expr, TupleGetItem, TupleType, Var, shape
from autodiff.library import call as library_call

__all__ = []


@library_gradient("library.embedding")
def embedding(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dweight[v] = sum of g over the positions where indices = v, but padding_idx"""
    weight, indices, padding_idx, scale_grad_by_freq = call.args
    args = [g, indices, relax.prim_value(shape(weight)[0]), padding_idx, scale_grad_by_freq]
    return [library_call("embedding_backward", args, weight.ty), None, None, None]


@library_gradient("library.scaled_dot_product_flash_attention")
def scaled_dot_product_flash_attention(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dq, dk, dv of out = dropout(softmax(q k^T scale + mask)) v (Dao et al., 2022); only ``out`` has a gradient."""
    q, k, v, *rest = call.args
    out, logsumexp = emit(TupleGetItem(y, 0)), emit(TupleGetItem(y, 1))
    grad_out = emit(TupleGetItem(g, 0))
    backward = library_call(
        "scaled_dot_product_flash_attention_backward",
        [grad_out, q, k, v, out, logsumexp, *rest],
        TupleType([q.ty, k.ty, v.ty]),
    )
    grads = emit(backward)
    return [TupleGetItem(grads, 0), TupleGetItem(grads, 1), TupleGetItem(grads, 2)] + [None] * len(rest)


@refuses("library.scaled_dot_product_flash_attention")
def attention_mask(call: Call, active: Collection[Var]) -> str | None:
    """The fused kernel computes no gradient for an additive mask."""
    if any(arg in active for arg in call.args[4:] if isinstance(arg, Var)):
        return "the fused kernel has no gradient with respect to attn_mask"
    return None
