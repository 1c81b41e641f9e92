"""Registry of conversions: ATen overload → the function that emits its Relax form; filled by the modules beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["CONVERSIONS", "UnsupportedUse", "converts", "rounds_once"]

#: ATen overload -> ``convert(importer, node, *args, **kwargs)``, which returns a Relax value (or a tuple of them).
CONVERSIONS: dict[Any, Callable[..., Any]] = {}


class UnsupportedUse(Exception):
    """Raised by a conversion for arguments that it does not handle exactly; says what and, if it can, what to do."""

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
    """A conversion to several operators of what torch, for half types, computes in float32 and rounds at the end."""

    @functools.wraps(convert)
    def converted(importer: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        return importer.in_float32(convert, node, args, kwargs)

    return converted
