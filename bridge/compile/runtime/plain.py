"""Plain form of a program's data: frozen dataclasses, tuples and numbers ↔ what JSON holds, nothing lost.

A tuple is a list, a dataclass an object whose ``"is"`` is the class's name; there are no other lists and objects. A
symbolic extent is its terms; the scope that it belongs to is told to who reads it.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from autodiff.extents import Composite, Extent, ExtentScope, Guard, ScopeState, Symbol
from bridge.compile.loop_ir.graph import Positions
from bridge.compile.runtime.contents import Contents, Operation
from bridge.compile.runtime.instructions import CallLibrary, Launch, View
from bridge.compile.runtime.layout import Layout, Register
from bridge.compile.runtime.loop_step import Loop
from bridge.library import TensorAt, TensorsAt

__all__ = ["from_plain", "to_plain"]

_CLASSES = {
    kind.__name__: kind
    for kind in (
        *(CallLibrary, Contents, Launch, Layout, Loop, Operation, Positions, Register, TensorAt, TensorsAt, View),
        *(Composite, Guard, ScopeState, Symbol),
    )
}


def to_plain(value: Any) -> Any:
    """What JSON holds. ``TypeError`` for anything that is not a program's data."""
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Extent):
        return {"is": "Extent", "terms": to_plain(value.terms)}
    if type(value) in _CLASSES.values():
        return {"is": type(value).__name__} | {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if type(value) is float and not math.isfinite(value):
        return {"is": "float", "value": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a program's data is frozen and plain, got {value!r} of {type(value)}")


def from_plain(plain: Any, scope: ExtentScope | None = None) -> Any:
    """The inverse of :func:`to_plain`, extents being ``scope``'s. ``ValueError`` for an object that is none of those it
    makes."""
    if isinstance(plain, list):
        return tuple(from_plain(item, scope) for item in plain)
    if not isinstance(plain, dict):
        return plain
    given = {name: from_plain(item, scope) for name, item in plain.items()}
    name = given.pop("is", None)
    if name == "Extent" and scope is not None:
        return Extent(scope, given["terms"])
    if name == "float":
        return float(given["value"])
    if name not in _CLASSES or given.keys() != {each.name for each in fields(_CLASSES[name])}:
        raise ValueError(f"wanted a part of a program, got {name!r} with {', '.join(given)}")
    return _CLASSES[name](**given)
