"""Steps of a reduction in code: identity, combination, the lanes of a vector folded into one.

In which order the steps are made is :mod:`bridge.compile.schedule.order`.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx import Expr

from bridge.compile.codegen.emit import Emitter, element_type
from bridge.compile.codegen.pointwise import maximum, minimum

__all__ = ["combine", "fold_lanes", "identity"]


def identity(op: str, dtype: str) -> float:
    """What a reduction of nothing gives. ``max`` and ``min`` start from the type's ends."""
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if "float" in dtype:
        return -math.inf if op == "max" else math.inf
    bound = tirx.min_value(dtype) if op == "max" else tirx.max_value(dtype)
    return int(bound.value)


def combine(e: Emitter, op: str, a: Expr, b: Expr) -> Expr:
    """One step of a reduction: ``a`` is the accumulator."""
    match op:
        case "sum":
            return tirx.Add(a, b)
        case "prod":
            return tirx.Mul(a, b)
        case "max":
            return maximum(e, a, b)
        case "min":
            return minimum(e, a, b)
    raise NotImplementedError(f"no reduction is called {op!r}")


def fold_lanes(e: Emitter, op: str, vector: Expr) -> Expr:
    """One lane from a vector of the emitter's, by halves."""
    lanes = e.lanes
    while lanes > 1:
        lanes //= 2
        vector = e.bind(vector)
        low = e.bind(tirx.Shuffle([vector], list(range(lanes))))
        high = e.bind(tirx.Shuffle([vector], list(range(lanes, 2 * lanes))))
        vector = combine(e, op, low, high)
    return e.bind(vector, element_type(vector)[0])
