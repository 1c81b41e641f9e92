"""Splits at numbers: ``torch.tensor_split`` at places that a tensor holds → places that are read as forward's numbers.

torch reads them in C++, past :mod:`bridge.capture.readings`.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["SplitAtNumbers"]

_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)
_PLACES = "tensor_indices_or_sections"


class SplitAtNumbers(TorchFunctionMode):
    """While what forward reads is recorded or given: where it splits a tensor is among it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SPLITS:
            x, *rest = args
            others = {name: each for name, each in kwargs.items() if name != _PLACES}
            places = kwargs[_PLACES] if _PLACES in kwargs else rest.pop(0) if rest else None
            if isinstance(places, torch.Tensor) and places.dtype is torch.int64 and places.dim() < 2:
                return func(x, _numbers(places), *rest, **others)
        return func(*args, **kwargs)


def _numbers(places: torch.Tensor) -> int | list[int]:
    return places.tolist()
