"""Observed draws and results where sizes vary: their extents and sizes → what eager draws and returns for these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any

from autodiff.extents import Extent, ExtentScope
from bridge.capture import Draw, Output
from bridge.dispatch.guards import Sizes

__all__ = ["Observed", "observed_for"]


@dataclass(frozen=True)
class Observed:
    """What eager draws and what it returns."""

    draws: tuple[Draw, ...]
    outputs: tuple[Output, ...]


def observed_for(observed: Observed, scope: ExtentScope) -> Callable[[Sizes], Observed]:
    """What gives the same for certain sizes: every extent in shapes, strides, offsets and arguments is a number."""
    places: dict[tuple, int] = {}
    extents: list[Extent] = []
    make = _maker(observed, places, extents) or (lambda _: observed)
    values = scope.compiled(extents)
    return lambda sizes: make(values(sizes))


def _maker(value: Any, places: dict[tuple, int], extents: list[Extent]) -> Callable[[Sequence[int]], Any] | None:
    """What gives a value with numbers where it holds extents, which are collected; ``None`` if it holds none."""
    if isinstance(value, Extent):
        place = places.setdefault(value.terms, len(extents))
        if place == len(extents):
            extents.append(value)
        return itemgetter(place)
    makers = [_maker(part, places, extents) for part in _parts(value)]
    if not any(makers):
        return None
    if type(value) in (list, tuple):
        kind = type(value)
        known = list(zip(makers, value, strict=True))
        return lambda numbers: kind([part if make is None else make(numbers) for make, part in known])
    changed = [(field.name, make) for field, make in zip(fields(value), makers, strict=True) if make is not None]
    return lambda numbers: replace(value, **{name: make(numbers) for name, make in changed})


def _parts(value: Any) -> Sequence[Any]:
    if type(value) in (list, tuple):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()
