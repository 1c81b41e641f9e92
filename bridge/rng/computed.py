"""Which masks kernels compute: observed dropouts of a GPU → how eager draws each, where that is known to the bit.

It is known for dense tensors of the usual types, on a GPU that draws as the formula says
(:mod:`bridge.rng.check_philox`): in memory of the call's own, and in an input's that begins where torch's allocator
would have it begin, which is then a condition of the entry (:func:`alignment_of`). Every other mask is drawn by torch
before the program runs, and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from autodiff.extents import Dim, divides, same
from bridge.base.generators import at_state, default_generator
from bridge.capture import Draw
from bridge.compile import IN_A_ROW, DrawnMask, Gpu
from bridge.rng.attention_mask import AttentionMask
from bridge.rng.fused import NATIVE_DROPOUT, FusedDropout

__all__ = ["alignment_of", "computed_mask", "mask_at"]

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 16
"""Bytes that a thread of eager's kernel loads at once, at most."""


def computed_mask(draw: Draw, gpu: Callable[[], Gpu | None]) -> DrawnMask | None:
    """How eager draws a mask; ``None``: it is to be stored.

    Where it reads an input's memory, that holds for memory that begins at a multiple of :func:`alignment_of` it.

    Args:
        gpu: the size of the GPU, asked for last; ``None`` where it does not draw as expected.
    """
    if draw.device.type != "cuda" or draw.is_computed:
        return None
    if draw.is_attention_mask:
        return DrawnMask(draw.args[0], IN_A_ROW, 1) if _count(draw) < 2**31 and gpu() is not None else None
    operand = draw.operand
    if draw.op != NATIVE_DROPOUT:
        return None
    if operand.dtype not in _TYPES or not _is_dense(draw.shape, operand.stride):
        return None
    count = _count(draw)
    width = _width(count, operand.offset, operand.dtype.itemsize)
    if width is None or count >= 2**31 or (size := gpu()) is None:
        return None
    return DrawnMask(draw.args[0], width, size.launched(count))


def alignment_of(draw: Draw) -> int:
    """Bytes: how many elements a thread of eager's kernel loads at once changes with addresses below these alone."""
    size = draw.operand.dtype.itemsize
    return (_width(_count(draw), 0, size) or _WIDEST // size) * size


def mask_at(draw: Draw, state: torch.Tensor) -> torch.Tensor:
    """A mask that kernels compute, by torch, from the generator's state before the draw. The generator is not moved."""
    if not draw.is_attention_mask and draw.operand.of is not None:
        draw = replace(draw, operand=replace(draw.operand, of=None))  # it begins where memory of the call's own would
    make = AttentionMask(draw) if draw.is_attention_mask else FusedDropout(draw)
    with at_state(default_generator(draw.device), *state.tolist()):
        (mask,) = make.draw(None, ())
    return mask


def _count(draw: Draw) -> Dim:
    """Elements of a draw."""
    count: Dim = 1
    for extent in draw.shape:
        count = count * extent
    return count


def _is_dense(shape: Sequence[Dim], stride: Sequence[Dim]) -> bool:
    step: Dim = 1
    for extent, own in zip(reversed(shape), reversed(stride), strict=True):
        if not same(extent, 1) and not same(own, step):
            return False
        step = step * extent
    return True


def _width(count: Dim, offset: Dim, size: int) -> int | None:
    """How many elements of so many bytes a thread loads at once; ``None`` if that depends on sizes that vary."""
    width = _WIDEST // size
    while width > 1 and not (divides(width, count) and divides(width * size, offset)):
        if not isinstance(count, int) or not isinstance(offset, int):
            return None
        width //= 2
    return width
