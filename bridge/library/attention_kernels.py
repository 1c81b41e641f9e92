"""Fused attention of CUDA: torch's kernels forward and backward by name, and the formula that they all compute.

Dropout is drawn inside of a kernel, from its GPU's default generator. Backward, the kernel draws the same again, from
the seed and the offset at which the generator was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bridge.base.generators import own_at
from bridge.base.torch_internals import aten
from bridge.library.padding import move

__all__ = ["FORMULA", "KERNELS", "SUMS", "Dropout", "Kernel"]


_ACCESS = 16
"""Bytes of a kernel's widest access, and those that are left unused behind each row of keys."""


class Dropout(NamedTuple):
    """Which weights are dropped.

    Attributes:
        rate: the probability of a zero.
        state: the generator's before the forward: seed and offset, uint64, on the host; backward, while a stream is
            captured, on the device.
    """

    rate: float
    state: Tensor


class Kernel(NamedTuple):
    """One of the kernels.

    Attributes:
        forward: ``(q, k, v, mask, is_causal, scale, dropout)`` → out, logsumexp, and more; what it drops it draws from
            the default generator, where that is.
        backward: ``(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout)`` → dq, dk, dv, and more; of
            the formula, and of the kernel that has it, the mask's gradient comes next if ``of_mask``.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _rate(dropout: Dropout | None) -> float:
    return 0.0 if dropout is None else dropout.rate


def _state_at(device: torch.device, dropout: Dropout) -> Tensor:
    """Seed and offset on the device, without waiting for it."""
    return dropout.state if dropout.state.is_cuda else dropout.state.pin_memory().to(device, non_blocking=True)


def _flash(q, k, v, mask, is_causal, scale, dropout=None):
    return aten._scaled_dot_product_flash_attention(q, k, v, _rate(dropout), is_causal, False, scale=scale)


def _flash_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout=None):
    # without dropout, the state is not read
    state = q.new_empty(2, dtype=torch.uint64) if dropout is None else _state_at(q.device, dropout)
    rest = [None, None, q.shape[2], k.shape[2], _rate(dropout), is_causal, state, state[1]]
    return aten._scaled_dot_product_flash_attention_backward(grad_out, q, k, v, out, logsumexp, *rest, scale=scale)


def _efficient(q, k, v, mask, is_causal, scale, dropout=None):
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, _rate(dropout), is_causal, scale=scale)


def _efficient_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout=None, of_mask=False):
    unread = q.new_empty((), dtype=torch.int64)
    # seed and offset are read where they are wanted: on the host, or by a kernel that is captured
    state = [unread, unread] if dropout is None else dropout.state.view(torch.int64).unbind()
    wanted = [True, True, True, of_mask]
    return aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, mask, out, logsumexp, *state, _rate(dropout), wanted, is_causal, scale=scale
    )


def _cudnn(q, k, v, mask, is_causal, scale, dropout=None):
    q = _rows_outside(q)  # out lies as q does
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, _rate(dropout), is_causal, False, scale=scale)


def _cudnn_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout=None):
    # torch keeps cuDNN's plans by the bytes of the rate and by the layout of q, k and v, each for an out and a grad_out
    # that lie as in the call that made it, and reads others as if they lay so. Here these two lie as (batch, row, head,
    # column), and the plan is none of eager's, which may be for another layout of theirs: the rate is -0.0, or keys lie
    # as in no call of eager's.
    q, v = map(_rows_outside, (q, v))
    k = _rows_outside(k) if dropout is None else _apart(k)
    unread = q.new_empty((), dtype=torch.int64)
    state = [unread, unread] if dropout is None else _state_at(q.device, dropout).view(torch.int64).unbind()
    rest = [*state, mask, None, None, q.shape[2], k.shape[2], _rate(dropout) or -0.0, is_causal]
    given = [_dense_rows(grad_out), q, k, v, out, logsumexp]
    return aten._scaled_dot_product_cudnn_attention_backward(*given, *rest, scale=scale)


def _rows_outside(x: Tensor) -> Tensor:
    """``x`` of (batch, head, row, column) with its rows outside of the heads in memory, so that its gradient's are."""
    steps = [x.stride(axis) for axis in (0, 2, 1, 3) if x.shape[axis] > 1]
    is_so = all(step > 0 for step in steps) and steps == sorted(steps, reverse=True) and _is_aligned(x)
    return x if is_so else _with_rows_outside(x)


def _dense_rows(x: Tensor) -> Tensor:
    """The same, and dense."""
    return x if x.transpose(1, 2).is_contiguous() and _is_aligned(x) else _with_rows_outside(x)


def _with_rows_outside(x: Tensor) -> Tensor:
    batch, heads, rows, columns = x.shape
    return _copied(x, x.new_empty(batch, rows, heads, columns).transpose(1, 2))


def _apart(x: Tensor) -> Tensor:
    """A copy that lies as (batch, row, head, column), with 16 unused bytes behind each row. Behind the only batch, they
    are a matter of its stride: there, nothing is copied.
    """
    batch, heads, rows, columns = x.shape
    unused = _ACCESS // x.element_size()
    if batch == 1:
        x = _rows_outside(x)
        return x.as_strided(x.shape, (x.numel() + unused, *x.stride()[1:]))
    memory = x.new_empty(batch, rows, heads * columns + unused)
    return _copied(x, memory[:, :, : heads * columns].unflatten(2, (heads, columns)).transpose(1, 2))


def _copied(source: Tensor, target: Tensor) -> Tensor:
    """``target`` with the source's numbers."""
    move(source, target)
    return target


def _is_aligned(x: Tensor) -> bool:
    """Whether what neighbours in a row are neighbours in memory, and rows are made of whole accesses."""
    unit = _ACCESS // x.element_size()
    numbers = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    return x.stride(-1) == 1 and not x.data_ptr() % _ACCESS and not any(number % unit for number in numbers)


def _scores(q, k, mask, is_causal, scale):
    scores = q @ _of_all_heads(k, q).mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def _of_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of grouped heads, once for each head of the queries."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _of_groups(grad: Tensor, x: Tensor) -> Tensor:
    return grad if x.shape[1] == grad.shape[1] else grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _noise(weights: Tensor, dropout: Dropout | None) -> Tensor | float:
    """What weights are multiplied by: numbers of the formula's own, since only a kernel knows a kernel's."""
    if dropout is None:
        return 1.0
    generator = own_at(weights.device, dropout.state)
    kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= dropout.rate
    return kept.to(weights.dtype) / (1 - dropout.rate)


def _formula(q, k, v, mask, is_causal, scale, dropout=None):
    scores = _scores(q, k, mask, is_causal, scale)
    weights = torch.softmax(scores, -1)
    return weights * _noise(weights, dropout) @ _of_all_heads(v, q), torch.logsumexp(scores, -1)


def _formula_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout=None, of_mask=False):
    weights = torch.softmax(_scores(q, k, mask, is_causal, scale), -1)
    noise = _noise(weights, dropout)
    d_weights = grad_out @ _of_all_heads(v, q).mT * noise
    d_mask = weights * (d_weights - (grad_out * out).sum(-1, keepdim=True))
    d_scores = d_mask * scale
    dv = (weights * noise).mT @ grad_out
    grads = d_scores @ _of_all_heads(k, q), _of_groups(d_scores.mT @ q, k), _of_groups(dv, v)
    return (*grads, d_mask) if of_mask else grads


FORMULA = Kernel(_formula, _formula_backward)
"""What they all compute, for checks: in float64, which no kernel takes, and elsewhere than on a GPU."""

SUMS = {
    "flash": lambda sums: sums,
    "efficient": lambda sums: torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32)),
    "cudnn": lambda sums: sums.unsqueeze(-1),
}
"""The formula's logsumexp in each kernel's form."""

KERNELS = {
    "flash": Kernel(_flash, _flash_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
    "cudnn": Kernel(_cudnn, _cudnn_backward),
}
"""By the word that torch's operator has in its name."""
