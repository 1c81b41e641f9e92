"""Constants and splats: a number -> a 0-d tensor; a tensor -> the one number it holds everywhere."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from autodiff.extents import Dim, Extent
from autodiff.ir import Constant, Expr, dtype, numpy_value, op_name
from autodiff.library import number
from autodiff.ops import having
from autodiff.rewrite import Scope

__all__ = ["const", "ratio", "size", "splat"]

_FILLS = {"relax.zeros": 0, "relax.zeros_like": 0, "relax.ones": 1, "relax.ones_like": 1}
_PRESERVE_SPLAT = having("view", "plain")


def const(value: float | int | bool, like: Expr | str) -> Constant:
    """A 0-d constant of the element type of ``like`` (a tensor expression, or an element type)."""
    return relax.const(value, like if isinstance(like, str) else dtype(like))


def size(value: Dim, like: Expr) -> Expr:
    """A size as a 0-d tensor of the element type of ``like``."""
    return number(value, dtype(like))


def ratio(numerator: int, denominator: Dim, like: Expr) -> Expr:
    """``numerator / denominator`` in float64, rounded to the element type of ``like``: the same bits for a size that
    is a number and for an extent of that size."""
    if not isinstance(denominator, Extent):
        return const(numerator / denominator, like)
    exact = op.divide(const(numerator, "float64"), number(denominator, "float64"))
    return exact if dtype(like) == "float64" else op.astype(exact, dtype(like))


def splat(value: Expr, scope: Scope) -> float | int | None:
    """The number that every element of ``value`` is known to be, or ``None``.

    Known are zeros/ones/full and their ``_like`` forms, constants of one repeated number, and those reshaped.
    """
    value = scope.definition(value)
    if isinstance(value, Constant):
        array = numpy_value(value)
        if array.size == 0:
            return None
        first = array.flat[0]
        return first.item() if array.size == 1 or (array == first).all() else None
    name = op_name(value)
    if name in _FILLS:
        return _FILLS[name]
    if name in ("relax.full", "relax.full_like"):
        return splat(value.args[1], scope)
    if name in _PRESERVE_SPLAT:
        return splat(value.args[0], scope)
    return None
