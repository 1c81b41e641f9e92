"""Padding, and what it is made of: a tensor → one with numbers that are all alike around it; copies of parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["move", "pad_into"]

_WIDER = torch.complex128, torch.complex64, torch.int32
"""As which types rows are moved, the widest one that divides them."""
_SHORT_ROW = 1024
"""Bytes of a row below which a processor fills all of it as soon as a number at its end."""


def pad_into(out: Tensor, x: Tensor, begins: Sequence[int], number: float = 0) -> None:
    """Writes a tensor of as many axes from ``begins`` on, and ``number`` into all that is before and behind it.

    Args:
        out: dense, on the tensor's device and of its element type; where it has room for it.
    """
    whole = not out.is_cuda and out.shape[-1] != x.shape[-1] and out.shape[-1] * out.element_size() < _SHORT_ROW
    inside = out.fill_(number) if whole else out
    for axis, (begin, extent) in enumerate(zip(begins, x.shape, strict=True)):
        end = begin + extent
        for start, width in ((0, begin), (end, out.shape[axis] - end)):
            if width and not whole:
                inside.narrow(axis, start, width).fill_(number)
        inside = inside.narrow(axis, begin, extent)
    move(x, inside)


def move(source: Tensor, target: Tensor) -> None:
    """Copies rows, by as many numbers at once as divide them."""
    for kind in _WIDER:
        unit = kind.itemsize // source.element_size()
        if all(_is_of(unit, each) for each in (source, target)):
            source, target = source.view(kind), target.view(kind)
            break
    target.copy_(source)


def _is_of(unit: int, x: Tensor) -> bool:
    """Whether rows begin, and end, at multiples of so many numbers."""
    if unit == 0 or x.ndim == 0 or x.stride(-1) != 1:
        return False
    numbers = x.shape[-1], *x.stride()[:-1], x.storage_offset(), x.data_ptr() // x.element_size()
    return not any(number % unit for number in numbers)
