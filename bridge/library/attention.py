"""Scaled dot-product attention by torch's fused kernels (CPU and CUDA) and its VJP.

CUDA: torch's forward and backward kernels by name, and the formula that they all compute. The trace decides which of
them eager uses; a call names it. Dropout is drawn inside a kernel, from its GPU's default generator, which is
temporarily set to its state at this place of the program. The backward kernel draws the same numbers again, from that
seed and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autodiff.library import LEARNED
from bridge.base.generators import at_state, default_generator, own_at
from bridge.base.torch_internals import VF, aten
from bridge.library.convolution import move
from bridge.library.registry import library_function

_ACCESS = 16
"""Bytes of a kernel's widest access, and of the gap behind each row of padded keys."""


class Dropout(NamedTuple):
    """Dropout of attention weights.

    Attributes:
        rate: the probability of a zero.
        state: the generator's state before the forward: seed and offset, uint64, on the host; in the backward, on the
            device under stream capture.
    """

    rate: float
    state: Tensor


class AttentionKernel(NamedTuple):
    """A forward and a backward kernel.

    Attributes:
        forward: ``(q, k, v, mask, is_causal, scale, dropout)`` → out, logsumexp, and more; draws its dropout from the
            default generator's present state.
        backward: ``(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout)`` → dq, dk, dv, and more; with
            ``of_mask`` (only some kernels and the formula) the mask's gradient comes next.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _rate(dropout: Dropout | None) -> float:
    return 0.0 if dropout is None else dropout.rate


def _state_at(device: torch.device, dropout: Dropout) -> Tensor:
    """Seed and offset on the device, without a synchronization."""
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
    # seed and offset are read on the host, or by a captured kernel on the device
    state = [unread, unread] if dropout is None else dropout.state.view(torch.int64).unbind()
    wanted = [True, True, True, of_mask]
    return aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, mask, out, logsumexp, *state, _rate(dropout), wanted, is_causal, scale=scale
    )


def _cudnn(q, k, v, mask, is_causal, scale, dropout=None):
    q = _rows_outside(q)  # out takes q's layout
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, _rate(dropout), is_causal, False, scale=scale)


def _cudnn_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout=None):
    # torch caches cuDNN's plans by the bytes of the rate and the layouts of q, k and v. A plan assumes the layouts that
    # out and grad_out had in its first call. Here both are (batch, row, head, column), so the plan must not be one of
    # eager's, which may assume others: the rate is -0.0, or the keys have a layout that eager never uses.
    q, v = map(_rows_outside, (q, v))
    k = _rows_outside(k) if dropout is None else _apart(k)
    unread = q.new_empty((), dtype=torch.int64)
    state = [unread, unread] if dropout is None else _state_at(q.device, dropout).view(torch.int64).unbind()
    rest = [*state, mask, None, None, q.shape[2], k.shape[2], _rate(dropout) or -0.0, is_causal]
    given = [_dense_rows(grad_out), q, k, v, out, logsumexp]
    return aten._scaled_dot_product_cudnn_attention_backward(*given, *rest, scale=scale)


def _rows_outside(x: Tensor) -> Tensor:
    """``x`` (batch, head, row, column) in a memory layout with rows outside of heads, which its gradient takes over."""
    steps = [x.stride(axis) for axis in (0, 2, 1, 3) if x.shape[axis] > 1]
    is_so = all(step > 0 for step in steps) and steps == sorted(steps, reverse=True) and _is_aligned(x)
    return x if is_so else _with_rows_outside(x)


def _dense_rows(x: Tensor) -> Tensor:
    """``x`` in the dense memory layout (batch, row, head, column)."""
    return x if x.transpose(1, 2).is_contiguous() and _is_aligned(x) else _with_rows_outside(x)


def _with_rows_outside(x: Tensor) -> Tensor:
    batch, heads, rows, columns = x.shape
    return _copied(x, x.new_empty(batch, rows, heads, columns).transpose(1, 2))


def _apart(x: Tensor) -> Tensor:
    """A copy in the layout (batch, row, head, column) with 16 unused bytes behind each row.

    For a single batch it is a view with a larger batch stride.
    """
    batch, heads, rows, columns = x.shape
    unused = _ACCESS // x.element_size()
    if batch == 1:
        x = _rows_outside(x)
        return x.as_strided(x.shape, (x.numel() + unused, *x.stride()[1:]))
    memory = x.new_empty(batch, rows, heads * columns + unused)
    return _copied(x, memory[:, :, : heads * columns].unflatten(2, (heads, columns)).transpose(1, 2))


def _copied(source: Tensor, target: Tensor) -> Tensor:
    """Copies ``source`` into ``target``; returns ``target``."""
    move(source, target)
    return target


def _is_aligned(x: Tensor) -> bool:
    """Whether columns are contiguous, and rows consist of whole aligned accesses."""
    unit = _ACCESS // x.element_size()
    numbers = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    return x.stride(-1) == 1 and not x.data_ptr() % _ACCESS and not any(number % unit for number in numbers)


def _scores(q, k, mask, is_causal, scale):
    scores = q @ _of_all_heads(k, q).mT * scale
    if is_causal:
        scores = scores.masked_fill(VF.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def _of_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of grouped heads, repeated for each query head."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _of_groups(grad: Tensor, x: Tensor) -> Tensor:
    return grad if x.shape[1] == grad.shape[1] else grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _noise(weights: Tensor, dropout: Dropout | None) -> Tensor | float:
    """The dropout factors of the weights: drawn by the formula, since a kernel's own numbers are not accessible."""
    if dropout is None:
        return 1.0
    generator = own_at(weights.device, dropout.state)
    kept = VF.rand(weights.shape, generator=generator, device=weights.device) >= dropout.rate
    return kept.to(weights.dtype) / (1 - dropout.rate)


def _formula(q, k, v, mask, is_causal, scale, dropout=None):
    scores = _scores(q, k, mask, is_causal, scale)
    weights = VF.softmax(scores, -1)
    return weights * _noise(weights, dropout) @ _of_all_heads(v, q), VF.logsumexp(scores, -1)


def _formula_backward(grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout=None, of_mask=False):
    weights = VF.softmax(_scores(q, k, mask, is_causal, scale), -1)
    noise = _noise(weights, dropout)
    d_weights = grad_out @ _of_all_heads(v, q).mT * noise
    d_mask = weights * (d_weights - (grad_out * out).sum(-1, keepdim=True))
    d_scores = d_mask * scale
    dv = (weights * noise).mT @ grad_out
    grads = d_scores @ _of_all_heads(k, q), _of_groups(d_scores.mT @ q, k), _of_groups(dv, v)
    return (*grads, d_mask) if of_mask else grads


FORMULA = AttentionKernel(_formula, _formula_backward)
"""The formula of all kernels, for checks: in float64, which no kernel supports, and off the GPU."""

SUMS = {
    "flash": lambda sums: sums,
    "efficient": lambda sums: aten.constant_pad_nd(sums, (0, -sums.shape[-1] % 32)),
    "cudnn": lambda sums: sums.unsqueeze(-1),
}
"""The formula's logsumexp in each kernel's shape."""

KERNELS = {
    "flash": AttentionKernel(_flash, _flash_backward),
    "efficient": AttentionKernel(_efficient, _efficient_backward),
    "cudnn": AttentionKernel(_cudnn, _cudnn_backward),
}
"""By the word in the names of torch's operators."""


def _attention_mask(has_mask: int, rest: tuple) -> tuple[Tensor | None, tuple]:
    """The mask, if the arguments include one, and the other arguments."""
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
    # the kernel takes out in the forward's own layout: (batch, row, head, column)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, dropout_p, bool(is_causal), attn_mask=mask, scale=scale
    )


_ALIGNMENT = 16
"""Alignment of a mask's rows, in bytes."""


@library_function("attention")
def attention(kernel, q, k, v, has_mask, *rest):
    mask, (is_causal, scale) = _attention_mask(has_mask, rest)
    return _forward(kernel, q, k, v, mask, is_causal, scale)


@library_function("attention_backward")
def attention_backward(kernel, grad_out, q, k, v, out, logsumexp, has_mask, *rest):
    mask, (is_causal, scale) = _attention_mask(has_mask, rest)
    return _backward(kernel, grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, of_mask=has_mask == LEARNED)


@library_function("dropping_attention")
def dropping_attention(kernel, q, k, v, has_mask, *rest):
    """``MovedOtherwise`` where the generator does not move by ``advance``: later draws would not be eager's."""
    mask, (is_causal, scale, rate, advance, state) = _attention_mask(has_mask, rest)
    with _drawing(q.device, advance, state) if _kernel(kernel, q) is not FORMULA else nullcontext():
        return _forward(kernel, q, k, v, mask, is_causal, scale, Dropout(rate, state))


@library_function("dropping_attention_backward")
def dropping_attention_backward(kernel, grad_out, q, k, v, out, logsumexp, has_mask, *rest):
    mask, (is_causal, scale, rate, _, state) = _attention_mask(has_mask, rest)
    dropout = Dropout(rate, state)
    of_mask = has_mask == LEARNED
    return _backward(kernel, grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout, of_mask)


class MovedOtherwise(RuntimeError):
    """A kernel drew another count of random numbers than eager's kernel; the call falls back to eager."""


@contextmanager
def _drawing(device: torch.device, advance: int, state: Tensor) -> Iterator[None]:
    """While active, a device's default generator is in this state; at the end checks its move, and restores it."""
    generator, (seed, offset) = default_generator(device), state.tolist()
    with at_state(generator, seed, offset):
        yield
        moved = generator.get_offset() - offset
    if moved != advance:
        raise MovedOtherwise(f"attention's dropout moved the generator by {moved}, where eager's moved it by {advance}")


def _forward(name, q, k, v, mask, is_causal, scale, dropout=None):
    given = [*map(_dense_columns, (q, k, v)), _aligned(mask), bool(is_causal), scale, dropout]
    compute = _kernel(name, q)
    out, logsumexp, *_ = compute.forward(*given)
    if compute is FORMULA:
        logsumexp = SUMS[name](logsumexp).float()
    return out.transpose(1, 2), logsumexp


def _backward(name, grad_out, q, k, v, mask, out, logsumexp, is_causal, scale, dropout=None, of_mask=False):
    grad_out, q, k, v = map(_dense_columns, (grad_out.transpose(1, 2), q, k, v))
    out = out.contiguous().transpose(1, 2)
    given = [grad_out, q, k, v, _aligned(mask), out, logsumexp, bool(is_causal), scale, dropout]
    grads = _kernel(name, q).backward(*given, *([True] if of_mask else []))
    return *(grad.transpose(1, 2) for grad in grads[:3]), *((grads[3].contiguous(),) if of_mask else ())


def _kernel(name: str, q: Tensor) -> AttentionKernel:
    return KERNELS[name] if q.is_cuda and q.dtype is not torch.float64 else FORMULA


def _dense_columns(x: Tensor) -> Tensor:
    """``x`` with contiguous columns, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(mask: Tensor | None) -> Tensor | None:
    """The mask with aligned rows, in padded memory if necessary.

    Eager pads it as well; a program's own values are dense.
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
