"""Scaled dot-product attention by torch's fused kernels, and its VJP: the one for CPUs, those of CUDA.

On CUDA, which of its kernels eager takes is decided where the graph is traced; a call names it. Their dropout draws
from the generator inside of the kernel: calls are without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__: list[str] = []


def _attention_mask(has_mask: int, rest: tuple) -> tuple[Tensor | None, tuple]:
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


class _Kernel(NamedTuple):
    """One of CUDA's kernels, without dropout.

    Attributes:
        forward: ``(q, k, v, mask, is_causal, scale)`` → out, logsumexp, and more.
        backward: ``(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale)`` → dq, dk, dv, and more.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _flash(q, k, v, mask, is_causal, scale):
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)


def _flash_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale):
    seed = q.new_empty(2, dtype=torch.uint64)  # of the dropout: not read
    rest = [None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, seed[1]]
    return aten._scaled_dot_product_flash_attention_backward(grad_out, q, k, v, out, logsumexp, *rest, scale=scale)


def _efficient(q, k, v, mask, is_causal, scale):
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, is_causal, scale=scale)


def _efficient_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale):
    seed = q.new_empty((), dtype=torch.int64)
    wanted = [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, mask, out, logsumexp, seed, seed, 0.0, wanted, is_causal, scale=scale
    )


def _cudnn(q, k, v, mask, is_causal, scale):
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, is_causal, False, scale=scale)


def _cudnn_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale):
    # torch keeps cuDNN's plans by the layout of q, k and v, each for an out that lies as q does, and would read another
    # out as if it lay so. Here all of them lie as (batch, row, head, column).
    grad_out, q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_out, q, k, v))
    seed = q.new_empty((), dtype=torch.int64)
    rest = [seed, seed, mask, None, None, q.shape[2], k.shape[2], 0.0, is_causal]
    return aten._scaled_dot_product_cudnn_attention_backward(grad_out, q, k, v, out, logsumexp, *rest, scale=scale)


def _weights(q, k, mask, is_causal, scale):
    scores = q @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def _formula(q, k, v, mask, is_causal, scale):
    scores = _weights(q, k, mask, is_causal, scale)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def _formula_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale):
    weights = torch.softmax(_weights(q, k, mask, is_causal, scale), -1)
    d_scores = weights * (grad_out @ v.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
    return d_scores @ k, d_scores.mT @ q, weights.mT @ grad_out


FORMULA = _Kernel(_formula, _formula_backward)
"""What they all compute, for checks: in float64, which no kernel takes, and elsewhere than on a GPU."""

_SUMS = {
    "flash": lambda sums: sums,
    "efficient": lambda sums: torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32)),
    "cudnn": lambda sums: sums.unsqueeze(-1),
}
"""The formula's logsumexp in each kernel's form."""

KERNELS = {
    "flash": _Kernel(_flash, _flash_backward),
    "efficient": _Kernel(_efficient, _efficient_backward),
    "cudnn": _Kernel(_cudnn, _cudnn_backward),
}
"""By the word that torch's operator has in its name."""

_ALIGNMENT = 16
"""Bytes that rows of a mask begin at a multiple of."""


@library_function("attention")
def attention(kernel, q, k, v, has_mask, *rest):
    mask, (is_causal, scale) = _attention_mask(has_mask, rest)
    given = [*map(_dense_columns, (q, k, v)), _aligned(mask), bool(is_causal), scale]
    compute = _kernel(kernel, q)
    out, logsumexp, *_ = compute.forward(*given)
    if compute is FORMULA:
        logsumexp = _SUMS[kernel](logsumexp)
    return out.transpose(1, 2), logsumexp


@library_function("attention_backward")
def attention_backward(kernel, grad_out, q, k, v, out, logsumexp, has_mask, *rest):
    mask, (is_causal, scale) = _attention_mask(has_mask, rest)
    grad_out, q, k, v = map(_dense_columns, (grad_out.transpose(1, 2), q, k, v))
    out = out.contiguous().transpose(1, 2)
    given = [grad_out, q, k, v, _aligned(mask), out, logsumexp, bool(is_causal), scale]
    return tuple(_kernel(kernel, q).backward(*given)[:3])


def _kernel(name: str, q: Tensor) -> _Kernel:
    return KERNELS[name] if q.is_cuda and q.dtype is not torch.float64 else FORMULA


def _dense_columns(x: Tensor) -> Tensor:
    """Neighbours in a row are neighbours in memory: the kernels read nothing else."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(mask: Tensor | None) -> Tensor | None:
    """The mask with rows that begin as the kernels want them, in memory that is padded where need be.

    Eager pads it likewise; a program's own values are dense.
    """
    if mask is None:
        return None
    unit = _ALIGNMENT // mask.element_size()
    steps = [stride for extent, stride in zip(mask.shape[:-1], mask.stride(), strict=False) if extent > 1]
    if mask.stride(-1) == 1 and not any(step % unit for step in steps) and not mask.data_ptr() % _ALIGNMENT:
        return mask
    columns = mask.shape[-1]
    padded = mask.new_empty(*mask.shape[:-1], -(-columns // unit) * unit)[..., :columns]
    return padded.copy_(mask)
