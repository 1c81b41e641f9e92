"""Scaled dot-product attention → library functions: one for each of torch's fused kernels."""

from __future__ import annotations

import torch
from tvm import relax

from autodiff.ir import dtype, shape
from bridge.aten.dims import numbers_only
from bridge.aten.placed_draws import state_before
from bridge.aten.registry import UnsupportedUse, converts
from bridge.base.torch_internals import aten
from bridge.capture import TensorForm

__all__: list[str] = []

op = relax.op

_ROWS = 32
"""The efficient kernel's logsumexp has a multiple of so many rows."""


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
    logsumexp = logsumexp.to(torch.promote_types(out.dtype, torch.float32))  # in torch 2.11 it is float32, traced
    pair = importer.library("scaled_dot_product_flash_attention", args, (out, logsumexp))
    return importer.item(pair, 0), importer.item(pair, 1)


@converts(aten._scaled_dot_product_flash_attention.default)
def cuda_flash(importer, node, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return _attention(importer, node, "flash", q, k, v, None, dropout_p, is_causal, scale)


@converts(aten._scaled_dot_product_efficient_attention.default)
def cuda_efficient(importer, node, q, k, v, mask, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return _attention(importer, node, "efficient", q, k, v, mask, dropout_p, is_causal, scale)


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
    args = [kernel, q, k, v, bool(masks), *masks, bool(is_causal), float(scale)]
    name = "attention"
    if dropout_p:
        state, advance = state_before(importer, node)
        name, args = "dropping_attention", [*args, float(dropout_p), advance, state]
    pair = importer.library(name, args, (out, TensorForm((batch, heads, *sums), torch.float32)))
    return importer.emit(op.permute_dims(importer.item(pair, 0), [0, 2, 1, 3])), importer.item(pair, 1)
