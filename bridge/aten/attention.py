"""Scaled dot-product attention → library functions: one for each of torch's fused kernels; or products and a softmax.

The efficient kernel's formula takes its place where that is quicker (:func:`bridge.capture.attends_by_products`): the
dropout is the kernel's, drawn by its rule, and so are results where nothing may be attended to.
"""

from __future__ import annotations

import numpy as np
import torch
from tvm import relax

from autodiff.body import const
from autodiff.ir import TensorType, Var, dtype, shape
from autodiff.library import LEARNED
from bridge.aten.any_operator import computed_from
from bridge.aten.draws import state_before
from bridge.aten.registry import UnsupportedUse, converts, numbers_only
from bridge.base.quirks import quirk
from bridge.base.torch_internals import aten
from bridge.capture import STOP_GRADIENT, TensorForm, attends_by_products

__all__: list[str] = []

op = relax.op

_LOG2_E = 1.4426950408889634
"""By which the efficient kernel multiplies scores, in float32, before it raises 2 to them."""
_ROWS = 32
"""The efficient kernel's logsumexp has a multiple of so many rows."""


@quirk(
    "F.scaled_dot_product_attention",
    reason="traced, the logsumexp of a CPU's kernel is float32 for inputs in float64",
    test="tests/bridge/library/test_attention.py",
    until="2.12",
)
@converts(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(importer, node, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if dropout_p:
        raise UnsupportedUse("flash attention with dropout")
    mask = [] if attn_mask is None else [attn_mask]
    if scale is None:
        numbers_only("attention", shape(q)[-1])
        scale = shape(q)[-1] ** -0.5
    args = [q, k, v, bool(mask), *mask, float(dropout_p), bool(is_causal), float(scale)]
    out, logsumexp = node.meta["val"]
    logsumexp = logsumexp.to(torch.promote_types(out.dtype, torch.float32))
    pair = importer.library("scaled_dot_product_flash_attention", args, (out, logsumexp))
    return importer.item(pair, 0), importer.item(pair, 1)


@converts(aten._scaled_dot_product_flash_attention.default)
def cuda_flash(importer, node, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return _attention(importer, node, "flash", q, k, v, None, dropout_p, is_causal, scale)


@converts(aten._scaled_dot_product_efficient_attention.default)
def cuda_efficient(importer, node, q, k, v, mask, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    if _is_formula(importer, node, dropout_p):
        return _by_products(importer, node, q, k, v, mask, dropout_p, is_causal, scale), None
    return _attention(importer, node, "efficient", q, k, v, mask, dropout_p, is_causal, scale)


def _is_formula(importer, node, rate):
    """Whether products are taken; where it drops, eager's draw was observed as their mask, or it was not."""
    index = importer.captured.draw_of.get(node.name)
    if rate and index is not None:
        chosen = importer.captured.draws[index].is_attention_mask
    else:
        chosen = attends_by_products(node.target, *(each.meta["val"] for each in node.args[:3]))
    is_read = {user.args[1] for user in node.users} > {0}
    if chosen and is_read and rate:
        raise UnsupportedUse("the logsumexp of attention that drops", "call scaled_dot_product_attention")
    return chosen and not is_read


def _by_products(importer, node, q, k, v, mask, rate, is_causal, scale):
    """The kernel's formula. A row in which nothing may be attended to is zero, and so are its gradients."""
    emit = importer.emit
    if scale is None:
        numbers_only("attention", shape(q)[-1])
        scale = shape(q)[-1] ** -0.5
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    scores = emit(op.multiply(scores, const(float(scale), scores)))
    if mask is not None:
        scores = emit(op.add(scores, mask))
    if is_causal:
        rows, columns = (emit(op.arange(0, extent, 1, "int64")) for extent in shape(scores)[2:])
        seen = emit(op.greater_equal(importer.reshape(rows, (shape(rows)[0], 1)), columns))
        scores = emit(op.where(seen, scores, importer.constant(float("-inf"), dtype(scores))))
    if mask is None:
        weights = emit(op.nn.softmax(scores, -1))
    else:
        low = emit(op.max(scores, axis=[-1], keepdims=True))  # the kernel's exponents are those of 2, and overflow
        nothing, none = emit(op.multiply(low, const(_LOG2_E, low))), importer.constant(float("-inf"), dtype(low))
        nothing, zero = emit(op.equal(nothing, none)), importer.constant(0, dtype(low))
        weights = emit(op.nn.softmax(emit(op.where(nothing, zero, scores)), -1))
        weights = emit(op.where(nothing, zero, weights))
    if rate:
        weights = emit(op.multiply(weights, _noise(importer, node, weights, rate)))
    return emit(op.matmul(weights, v))


def _noise(importer, node, weights, rate):
    """What the kernel multiplies by: zero, or the reciprocal of what is kept, which it rounds once."""
    index = importer.captured.draw_of[node.name]
    if importer.draws.is_chained(index):
        raise UnsupportedUse("dropout of attention behind a draw on the host whose distribution is computed")
    mask = importer.draw_params[index] = Var(f"draw_{index}", TensorType(shape(weights), "bool"))
    kept = 1 / (1 - float(np.float32(rate)))
    return importer.emit(op.multiply(importer.cast(mask, dtype(weights)), const(kept, weights)))


@converts(aten._scaled_dot_product_cudnn_attention.default)
def cuda_cudnn(importer, node, q, k, v, mask, compute_log_sumexp, dropout_p=0.0, is_causal=False, *_, scale=None):
    return _attention(importer, node, "cudnn", q, k, v, mask, dropout_p, is_causal, scale)


def _attention(importer, node, kernel, q, k, v, mask, dropout_p, is_causal, scale):
    """Out and logsumexp of one of CUDA's kernels; nothing in the trace reads what else it returns."""
    if scale is None:
        numbers_only("attention", shape(q)[-1])
        scale = shape(q)[-1] ** -0.5
    batch, heads, rows, _ = shape(q)
    sums = {"flash": (rows,), "efficient": (-(-rows // _ROWS) * _ROWS,), "cudnn": (rows, 1)}[kernel]
    out = TensorForm((batch, rows, heads, shape(v)[-1]), getattr(torch, dtype(q)))
    masks = [] if mask is None else [mask]
    has_mask = LEARNED if kernel == "efficient" and masks and _is_learned(importer, node.args[3]) else bool(masks)
    args = [kernel, q, k, v, has_mask, *masks, bool(is_causal), float(scale)]
    name = "attention"
    if dropout_p:
        state, advance = state_before(importer, node)
        name, args = "dropping_attention", [*args, float(dropout_p), advance, state]
    pair = importer.library(name, args, (out, TensorForm((batch, heads, *sums), torch.float32)))
    return importer.emit(op.permute_dims(importer.item(pair, 0), [0, 2, 1, 3])), importer.item(pair, 1)


def _is_learned(importer, mask):
    """Whether a mask may have a gradient: a tensor that requires grad is among what it is computed from."""
    captured = importer.captured
    tensors = [*captured.module_tensors, *captured.arguments]

    def requires_grad(node):
        place = captured.placeholders.get(node.name) if node.op == "placeholder" else None
        return place is not None and tensors[place].requires_grad

    return computed_from(mask, requires_grad, lambda node: () if node.target is STOP_GRADIENT else node.all_input_nodes)
