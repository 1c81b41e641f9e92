"""Translations by operator name, and literal arguments: Relax expressions → Python numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.tirx import FloatImm, IntImm

from autodiff.extents import Dim, from_tir
from autodiff.ir import Constant, Expr, ShapeExpr, Tuple, shape

__all__ = ["TRANSLATIONS", "Translation", "number", "numbers", "register"]

Translation = Callable[[Any, Any], Any]
"""``(builder, call) -> operand``; a list of operands for a tuple-typed call, ``NotImplemented`` for "not this one"."""

TRANSLATIONS: dict[str, Translation] = {}
"""By name: Relax operators (``"relax.add"``), library functions (``"library.embedding"``), ``"fallback"``."""


def register(*names: str) -> Callable[[Translation], Translation]:
    """Register the translation of Relax operators (``"relax.add"``) or library functions (``"library.embedding"``)."""

    def decorate(function: Translation) -> Translation:
        for name in names:
            TRANSLATIONS[name] = function
        return function

    return decorate


def number(expr: Expr) -> Dim | float:
    """The Python number of a literal argument, or an extent. ``TypeError`` if it is neither."""
    if isinstance(expr, IntImm | FloatImm):
        return expr.value
    if isinstance(expr, Constant) and not shape(expr):
        return expr.value.numpy().item()
    if isinstance(expr, int | float):
        return expr
    try:
        return from_tir(expr)
    except ValueError as error:
        raise TypeError(f"wanted a number known at compile time or an extent, got {expr}") from error


def numbers(expr: Expr) -> list[Dim]:
    """The integers of a literal tuple or shape."""
    fields = expr.values if isinstance(expr, ShapeExpr) else expr.fields if isinstance(expr, Tuple) else expr
    return [int(each) if isinstance(each, float) else each for each in map(number, fields)]
