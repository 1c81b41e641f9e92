"""Scaled dot-product attention by torch's fused kernels, and its VJP: the one for CPUs, those of CUDA.

On CUDA, which of its kernels eager takes is decided where the graph is traced; a call names it. What a kernel drops it
draws from the GPU's default generator, which for that moment is put where it is at this place of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from autodiff.library import LEARNED
from bridge.base.generators import at_state, default_generator
from bridge.base.torch_internals import aten
from bridge.library.attention_kernels import FORMULA, KERNELS, SUMS, Dropout, Kernel
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


_ALIGNMENT = 16
"""Bytes that rows of a mask begin at a multiple of."""


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
    """``RuntimeError`` where the generator does not move by ``advance``: draws after it would not be eager's."""
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
    """A kernel drew another count of random numbers than eager's; the call is eager's."""


@contextmanager
def _drawing(device: torch.device, advance: int, state: Tensor) -> Iterator[None]:
    """While active, a device's default generator is in this state; then it has moved by ``advance`` and is put back."""
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


def _kernel(name: str, q: Tensor) -> Kernel:
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
