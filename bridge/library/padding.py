"""Padding: a matrix → one with zeros behind its rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pad_into"]

_WIDER = torch.complex128, torch.complex64, torch.int32
"""As which types rows are moved, the widest one that divides them."""


def pad_into(out: Tensor, x: Tensor) -> None:
    """The matrix in the first rows and columns of a dense one, zeros in the others."""
    rows, columns = x.shape
    _move(x, out[:rows, :columns])
    if rows < out.shape[0]:
        out[rows:].zero_()
    if columns < out.shape[1]:
        out[:rows, columns:].zero_()


def _move(source: Tensor, target: Tensor) -> None:
    """Copies rows, by as many numbers at once as divide them."""
    for kind in _WIDER:
        unit = kind.itemsize // source.element_size()
        if all(_is_of(unit, each) for each in (source, target)):
            source, target = source.view(kind), target.view(kind)
            break
    target.copy_(source)


def _is_of(unit: int, x: Tensor) -> bool:
    """Whether rows begin, and end, at multiples of so many numbers."""
    numbers = x.shape[1], x.stride(0), x.storage_offset(), x.data_ptr() // x.element_size()
    return unit > 0 and x.stride(1) == 1 and not any(number % unit for number in numbers)
