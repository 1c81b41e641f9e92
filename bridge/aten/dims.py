"""Dims of conversions: what Python computes with sizes that may be extents, without asking for more than it needs.

Where a number and an extent are equal for the sample only, conversions take the way that is right for all sizes; what
has no such way asks the extent, which makes a guard (:mod:`autodiff.extents`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autodiff.extents import Dim, Extent, maximum, minimum, same
from bridge.aten.registry import UnsupportedUse

__all__ = [
    "broadcast_shape",
    "clamped",
    "dims",
    "has_extents",
    "index_shape",
    "numbers_only",
    "same_shape",
]


def dims(shape: Iterable[Any]) -> tuple[Dim, ...]:
    """A shape as Relax types take it."""
    return tuple(extent if isinstance(extent, Extent) else int(extent) for extent in shape)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal for all sizes."""
    return len(a) == len(b) and all(map(same, a, b))


def has_extents(value: Any) -> bool:
    """Whether there are extents in arguments of a node: lists of them too."""
    if isinstance(value, tuple | list):
        return any(map(has_extents, value))
    return isinstance(value, Extent)


def numbers_only(what: str, *values: Any) -> None:
    """Refuses sizes that vary where numbers are made of them once: tables, windows, text."""
    if has_extents(values):
        raise UnsupportedUse(f"{what} of a size that varies", "leave that dimension out of dynamic_shapes")


def clamped(position: Dim, extent: Dim) -> Dim:
    """A start or an end of a slice as torch clamps it: counted from the end where it is negative, 0 to ``extent``."""
    if not isinstance(position, Extent) and position >= _NO_BOUND:
        return extent
    return minimum(maximum(position + extent if position < 0 else position, 0), extent)


_NO_BOUND = 2**62
"""A slice without an end is traced with the largest integer for one."""


def broadcast_shape(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """What shapes are broadcast to; they fit."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((extent for extent in axis if extent != 1), 1) for axis in zip(*padded, strict=True))


def index_shape(shape: Sequence[Dim], axes: Sequence[int], indices: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The shape of ``x[..., i, …, j, ...]`` with index tensors of these shapes along ``axes``, as torch places them."""
    broadcast = broadcast_shape(*indices)
    rest = [extent for axis, extent in enumerate(shape) if axis not in axes]
    first = axes[0] if list(axes) == list(range(axes[0], axes[0] + len(axes))) else 0
    return (*rest[:first], *broadcast, *rest[first:])
