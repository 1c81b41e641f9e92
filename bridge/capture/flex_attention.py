"""``flex_attention``: the operands of torch's higher-order operator → attention written out, which autograd follows.

torch's operator on a CPU has a forward alone, by the same formula. Scores are float32, of float64 tensors float64.
Four nested ``vmap`` (batch, head, query, key) call ``score_mod`` and ``mask_mod``, in which indices that are tensors
take elements. Rows that are masked completely give zeros, -inf for their logsumexp, and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.base.torch_higher_order import flex_attention_casts, indexing_by_tensors
from bridge.base.torch_internals import aten

__all__ = ["attention"]

_INDICES = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)
"""The axis over which each ``vmap`` goes of batch, head, query and key; the innermost one first."""


def attention(
    _: bool | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator's results.

    Args:
        query: ``(B, Hq, L, E)``.
        key: ``(B or 1, Hkv, S, E)``, Hkv a divisor of Hq.
        value: ``(B or 1, Hkv, S, Ev)``.
        score_mod: a score, four indices and ``score_mod_other_buffers`` → a score.
        block_mask: of ``BlockMask.as_tuple()``, whose last element takes four indices and ``mask_mod_other_buffers``.
        scale: of the products of queries and keys.
        kernel_options: of a GPU's kernels.

    Returns:
        The output ``(B, Hq, L, Ev)``, whose axes lie in memory as ``query``'s axes; logsumexp and maximum of the
        scores ``(B, Hq, L)``, divided by ln 2.
    """
    kind, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind) and flex_attention_casts(kind):
        given = (_cast(each, kind) for each in (query, key, value))
        rest = kernel_options, score_mod_other_buffers, mask_mod_other_buffers
        with torch.autocast(kind, enabled=False):
            return attention(_, *given, score_mod, block_mask, scale, *rest)
    batch, heads, rows, _ = query.shape
    working = torch.float64 if dtype == torch.float64 else torch.float32
    key, value = (_of_all_heads(each, batch, heads) for each in (key, value))
    scores = (query.to(working) @ key.to(working).transpose(-2, -1) * scale).to(working)
    places = [torch.arange(size, device=query.device) for size in (batch, heads, rows, key.shape[2])]
    with indexing_by_tensors():
        is_seen = _over_all(block_mask[-1], (), mask_mod_other_buffers)(*places, *mask_mod_other_buffers)
        scores = _over_all(score_mod, (0,), score_mod_other_buffers)(scores, *places, *score_mod_other_buffers)
    scores = torch.where(is_seen, scores, torch.full((), -math.inf, dtype=working, device=query.device))
    made = aten._safe_softmax.default(scores, -1).to(dtype) @ value.to(dtype)
    top = scores.detach().amax(-1, keepdim=True)
    shift = torch.where(top == -math.inf, 0.0, top)
    total = (scores - shift).exp().sum(-1)
    is_empty = total == 0
    logsumexp = torch.where(is_empty, -math.inf, torch.where(is_empty, 1.0, total).log() + shift.squeeze(-1))
    return _laid_out(made, query), logsumexp / math.log(2), top.squeeze(-1) / math.log(2)


def _cast(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind))


def _of_all_heads(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    if heads != x.shape[1]:
        x = x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)
    return x.expand(batch, -1, -1, -1)


def _over_all(function: Callable[..., Any], first: tuple, others: Sequence[Any]) -> Callable[..., Any]:
    """A function of four indices → the same, of all batches, heads, queries and keys at once."""
    for axes in _INDICES:
        function = torch.vmap(function, in_dims=(*first, *axes, *(None for _ in others)))
    return function


def _laid_out(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor whose axes lie in memory as another one's do, where its last axis then is dense; else that innermost."""
    order = sorted(range(x.ndim), key=like.stride, reverse=True)
    strides = _strides(x.shape, order)
    if strides[-1] != 1:
        strides = _strides(x.shape, [*(axis for axis in order if axis != x.ndim - 1), x.ndim - 1])
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides of a dense tensor, whose axes are given from the outermost to the innermost."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis], step = step, step * shape[axis]
    return strides
