"""Scaled dot-product attention by torch's flash kernel for CPUs, and its VJP."""

from __future__ import annotations

import torch

from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__: list[str] = []


def _attention_mask(has_mask: int, rest: tuple) -> tuple[torch.Tensor | None, tuple]:
    """The mask, which is among the arguments only if there is one, and the others."""
    return (rest[0], rest[1:]) if has_mask else (None, rest)


@library_function("scaled_dot_product_flash_attention", aten._scaled_dot_product_flash_attention_for_cpu)
def flash_attention(q, k, v, has_mask, *rest):
    mask, (dropout_p, is_causal, scale) = _attention_mask(has_mask, rest)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, bool(is_causal), attn_mask=mask, scale=scale
    )


@library_function(
    "scaled_dot_product_flash_attention_backward", aten._scaled_dot_product_flash_attention_for_cpu_backward
)
def flash_attention_backward(grad_out, q, k, v, out, logsumexp, has_mask, *rest):
    mask, (dropout_p, is_causal, scale) = _attention_mask(has_mask, rest)
    # the kernel wants out in the layout that the forward made it in: (batch, row, head, column)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, dropout_p, bool(is_causal), attn_mask=mask, scale=scale
    )
