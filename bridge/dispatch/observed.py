"""Observed draws and results where sizes vary: their extents and sizes → what eager draws and returns for these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
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
    extents = list({extent.terms: extent for extent in _extents(observed)}.values())
    values = scope.compiled(extents)
    terms = [extent.terms for extent in extents]
    return lambda sizes: _with_numbers(observed, dict(zip(terms, values(sizes), strict=True)))


def _extents(value: Any) -> Iterator[Extent]:
    if isinstance(value, Extent):
        yield value
    for part in _parts(value):
        yield from _extents(part)


def _with_numbers(value: Any, numbers: dict[Any, int]) -> Any:
    """A value with numbers where it holds extents."""
    if isinstance(value, Extent):
        return numbers[value.terms]
    if type(value) in (list, tuple):
        return type(value)([_with_numbers(part, numbers) for part in value])
    if next(_extents(value), None) is None:
        return value
    changed = {field.name: _with_numbers(getattr(value, field.name), numbers) for field in fields(value)}
    return replace(value, **changed)


def _parts(value: Any) -> Sequence[Any]:
    if type(value) in (list, tuple):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()
