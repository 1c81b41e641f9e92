"""Registry of conversions: ATen overload → the function that emits its Relax form; filled by the other modules.

Helpers of conversions: dimensions, indices and element types. Where a number and an extent are equal for the sample
only, a conversion should emit code that is right for all sizes; otherwise it compares the extents, which adds a guard
(:mod:`autodiff.extents`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from autodiff.extents import Dim, Extent, broadcast, maximum, minimum
from bridge.base.devices import current_device
from bridge.capture import TensorMetadata

#: ATen overload -> ``convert(importer, node, *args, **kwargs)``, which returns a Relax value (or a tuple of them).
CONVERSIONS: dict[Any, Callable[..., Any]] = {}


class UnsupportedUse(Exception):
    """Raised by a conversion for arguments that it cannot convert exactly; has a reason and, if possible, a hint."""

    def __init__(self, reason: str, hint: str | None = None):
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def converts(
    *overloads: Any, table: dict[Any, Callable[..., Any]] = CONVERSIONS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a conversion for ATen overloads. ``ValueError`` if one of them has one in ``table`` already."""

    def register(convert: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            if overload in table:
                raise ValueError(f"{overload} has a conversion already: {table[overload].__name__}")
            table[overload] = convert
        return convert

    return register


def rounds_once(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for operators that torch computes in float32 for half types: casts operands, rounds results once."""

    @functools.wraps(convert)
    def converted(importer: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        return importer.in_float32(convert, node, args, kwargs)

    return converted


def dims(shape: Iterable[Any]) -> tuple[Dim, ...]:
    """A shape with the integers and extents that Relax types take."""
    return tuple(extent if isinstance(extent, Extent) else int(extent) for extent in shape)


def has_extents(value: Any) -> bool:
    """Whether a node's arguments contain extents, also within lists."""
    if isinstance(value, tuple | list):
        return any(map(has_extents, value))
    return isinstance(value, Extent)


def numbers_only(what: str, *values: Any) -> None:
    """Refuses dynamic sizes where numbers are needed when the program is built: tables, windows, text."""
    if has_extents(values):
        raise UnsupportedUse(f"{what} of a size that varies", "leave that dimension out of dynamic_shapes")


def clamped(position: Dim, extent: Dim) -> Dim:
    """The start or end of a slice as torch clamps it: a negative one counts from the end; from 0 to ``extent``."""
    if not isinstance(position, Extent) and position >= _NO_BOUND:
        return extent
    return minimum(maximum(position + extent if position < 0 else position, 0), extent)


_NO_BOUND = 2**62
"""A slice without an end is traced with the largest integer for one."""


def index_shape(shape: Sequence[Dim], axes: Sequence[int], indices: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The shape of ``x[..., i, …, j, ...]`` with index tensors of these shapes along ``axes``, by torch's rules."""
    rest = [extent for axis, extent in enumerate(shape) if axis not in axes]
    first = axes[0] if list(axes) == list(range(axes[0], axes[0] + len(axes))) else 0
    return (*rest[:first], *broadcast(indices), *rest[first:])


def lies_elsewhere(node: fx.Node) -> bool:
    """Whether a node's value is a tensor on another device than the call's."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | TensorMetadata) and value.device not in (None, current_device())


_NAMES = "float16 bfloat16 float32 float64 int8 uint8 int16 int32 int64 bool".split()
ELEMENT_TYPES = {getattr(torch, name): name for name in _NAMES}
"""torch's element types that Relax computes with → their names there, which are torch's."""


def relax_dtype(torch_dtype: torch.dtype) -> str:
    """The Relax name of a torch dtype. :class:`UnsupportedUse` for dtypes that Relax does not compute with."""
    if torch_dtype not in ELEMENT_TYPES:
        raise UnsupportedUse(f"values of type {torch_dtype}")
    return ELEMENT_TYPES[torch_dtype]
