"""Rounding and conversion: a value in its compute type → the value as its element type stores it."""

from __future__ import annotations

from tvm.tirx import Expr

from bridge.compile.codegen.emit import Emitter
from bridge.compile.codegen.pointwise import compute_type, different

__all__ = ["converted", "rounded"]


def rounded(e: Emitter, value: Expr, dtype: str, op: str = "") -> Expr:
    """``value`` rounded to a stored type, in its compute type. What ``op`` only moves is rounded already."""
    if compute_type(dtype) == dtype or op in ("copy", "concat", "pad"):
        return value
    return e.rounded(value, dtype)


def converted(e: Emitter, value: Expr, source: str, target: str) -> Expr:
    """A value of element type ``source`` as ``target``, both in their compute types: ``astype``."""
    if target == "bool":
        return different(value, e.const(0, compute_type(source)))
    if source == "bool":
        kind = compute_type(target)
        return e.select(value, e.const(1, kind), e.const(0, kind))
    if "float" in source and "int" in target:
        return e.truncated(value, target)
    return rounded(e, e.cast(value, compute_type(target)), target)
