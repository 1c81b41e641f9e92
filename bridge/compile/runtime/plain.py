"""Plain forms: a program's data ↔ JSON; functions of TVM ↔ canonical text, the same in every process.

Plain form of a program's data: frozen dataclasses, tuples and numbers ↔ what JSON holds, nothing lost.
A tuple is a list, a dataclass an object whose ``"is"`` is the class's name; there are no other lists and objects. A
symbolic extent is its terms; the scope that it belongs to is told to who reads it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tvm
import tvm_ffi

from autodiff.extents import Composite, Extent, ExtentScope, ScopeState, SizeGuard, Symbol
from bridge.compile.loop_ir.graph import Positions
from bridge.compile.runtime.contents import Operation, StepContents
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView
from bridge.compile.runtime.layout import Register, RegisterLayout
from bridge.compile.runtime.loop_frame import RunLoop
from bridge.library import TensorAt, TensorsAt

__all__ = ["canonical_text", "from_plain", "functions_of", "to_plain"]


_SMALL_FLOAT = re.compile(r'"value":(-?\d[\d.]*e-3\d\d)\b')


def canonical_text(functions: Sequence[Any]) -> str:
    """The text of TIR or Relax functions; :func:`functions_of` reads it.

    Raises:
        ValueError: a literal that TVM's JSON cannot hold, a float64 below 2.3e-308.
    """
    text = tvm.ir.save_json(tvm_ffi.Array(list(functions)))
    for number in _SMALL_FLOAT.findall(text):
        if abs(float(number)) < sys.float_info.min:
            raise ValueError(f"TVM's JSON cannot hold a kernel's literal {number}")
    return text


def functions_of(text: str) -> list[Any]:
    """The functions of a :func:`canonical_text` that this version of TVM wrote.

    ``tvm.ir.load_json`` would look for what older versions wrote first, which takes several times as long.
    """
    return list(tvm_ffi.serialization.from_json_graph_str(text))


_CLASSES = {
    kind.__name__: kind
    for kind in (
        *(
            CallLibrary,
            StepContents,
            Launch,
            RegisterLayout,
            RunLoop,
            Operation,
            Positions,
            Register,
            TensorAt,
            TensorsAt,
            MakeView,
        ),
        *(Composite, SizeGuard, ScopeState, Symbol),
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
