"""Whole reads: all numbers of a tensor at once, as text, as a numpy array, as elements of another tensor.

Text and arrays are those that eager makes; the numbers in them are read like any others. A tensor that is made of
others (``torch.tensor([n, 2 * n])``), whose numbers torch reads in C++, is computed of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import fx

from bridge.base.errors import Unsupported
from bridge.capture.recomputed import constant
from bridge.capture.rows import Read

__all__ = ["MAX_GUARDED", "SharedArrays", "tensor_of", "too_many"]

MAX_GUARDED = {str: 1000, np.ndarray: 0}
"""How many numbers a call compares for a text (torch shows so many whole), and for an array."""
_WORDS = {
    str: ("the text of a tensor", "too many numbers to compare at each call", "print outside of forward"),
    np.ndarray: (
        "Tensor.numpy",
        "what numpy computes is not in a graph; a compiled call would repeat the sample's numbers for ever",
        "compute it with torch, or outside of forward",
    ),
}


def too_many(reads: Sequence[Read], nodes: Sequence[Any], bound: Mapping[str, int]) -> list[Unsupported]:
    """Texts and arrays of more numbers than a call is to compare, where these are no constants.

    Args:
        nodes: of the numbers, in the functional graph.
        bound: the graph's placeholders of inputs, by name.
    """
    found = []
    for each, node in zip(reads, nodes, strict=True):
        limit = MAX_GUARDED.get(type(each.given))
        if limit is not None and each.reading.count > limit and isinstance(node, fx.Node):
            if constant(node, bound) is None:
                op, reason, hint = _WORDS[type(each.given)]
                found.append(Unsupported(op, each.reading.where, reason, hint))
    return found


class SharedArrays:
    """Arrays that Python was given, which share memory with tensors."""

    def __init__(self) -> None:
        self._arrays: list[tuple[np.ndarray, np.ndarray, str]] = []

    def add(self, array: np.ndarray, where: str) -> np.ndarray:
        """Notes what an array holds, and the line that asks for it; returns a copy of that."""
        self._arrays.append((array, array.copy(), where))
        return self._arrays[-1][1]

    def written(self) -> list[Unsupported]:
        """Those that hold other numbers by now."""
        reason = "an array that shares memory with a tensor is written, or the tensor is"
        hint = "compute it with torch, or on a copy: x.clone().numpy()"
        changed = [where for array, before, where in self._arrays if array.tobytes() != before.tobytes()]
        return [Unsupported("Tensor.numpy", where, reason, hint) for where in changed]


def tensor_of(data: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor | None:
    """``torch.tensor(data)`` of nested lists of numbers and tensors of one element, computed of these; ``None`` where
    there is none of them, or where torch has other rules."""
    shape, flat = _flat(data)
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    if shape is None or not tensors or isinstance(data, torch.Tensor):
        return None
    kinds = [each.dtype if isinstance(each, torch.Tensor) else _TYPES.get(type(each)) for each in flat]
    if None in kinds or any(each.numel() != 1 for each in tensors):
        return None
    kinds = [torch.get_default_dtype() if kind is float else kind for kind in kinds]
    dtype = reduce(torch.promote_types, kinds) if dtype is None else dtype
    if any(torch.promote_types(each.dtype, dtype) != dtype for each in tensors):
        return None
    with torch.no_grad():
        parts = [
            each.detach().reshape(()).to(device, dtype)
            if isinstance(each, torch.Tensor)
            else torch.full((), each, dtype=dtype, device=device)
            for each in flat
        ]
        return torch.stack(parts).reshape(shape)


_TYPES: dict[type, Any] = {bool: torch.bool, int: torch.int64, float: float}
"""Of Python's numbers; that of a float is the default one."""


def _flat(data: Any) -> tuple[tuple[int, ...] | None, list[Any]]:
    """The shape of nested lists, ``None`` if they are ragged, and what they hold."""
    if not isinstance(data, list | tuple):
        return (), [data]
    parts = [_flat(each) for each in data]
    shapes = {shape for shape, _ in parts}
    if len(shapes) != 1 or None in shapes:
        return None, []
    return (len(data), *shapes.pop()), [each for _, flat in parts for each in flat]
