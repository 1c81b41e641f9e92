"""Normalization primitives: ``x`` and axes -> the bindings that Layer-, Batch-, Group-, Instance- and RMSNorm share."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.relax import op

from autodiff.constants import const
from autodiff.ir import Expr, Var, dtype
from autodiff.rewrite import Scope

__all__ = ["affine", "cast", "normalize", "reciprocal_root", "statistics_dtype"]


def statistics_dtype(element_type: str) -> str:
    """The type in which means and variances are computed: float32 for half types, else the element type itself."""
    return "float32" if element_type in ("float16", "bfloat16") else element_type


def cast(value: Expr, element_type: str, scope: Scope, name: str) -> Expr:
    """``value`` as ``element_type``; no binding if it has that type already."""
    return value if dtype(value) == element_type else scope.emit(op.astype(value, element_type), name)


def reciprocal_root(moment: Expr, epsilon: float, scope: Scope, name: str) -> Var:
    """``rstd = 1 / sqrt(moment + epsilon)``: one variable, whose gradient needs nothing but itself."""
    shifted = scope.emit(op.add(moment, const(epsilon, moment)), f"{name}_shifted")
    return scope.emit(op.rsqrt(shifted), f"{name}_rstd")


def normalize(x: Expr, axes: Sequence[int], epsilon: float, scope: Scope, name: str) -> tuple[Var, Var, Var, Var]:
    """Binds ``(x - mean) * rstd``, ``mean``, ``variance`` (biased) and ``rstd``; statistics keep ``axes`` as size 1.

    The variance is the mean of the squared centred values (two passes): E[x^2] - E[x]^2 cancels catastrophically.
    Mean and rstd have one element per row, so that they can be saved for backward instead of wide tensors.
    """
    mean = scope.emit(op.mean(x, list(axes), keepdims=True), f"{name}_mean")
    centred = scope.emit(op.subtract(x, mean), f"{name}_centred")
    squared = scope.emit(op.square(centred), f"{name}_squared")
    variance = scope.emit(op.mean(squared, list(axes), keepdims=True), f"{name}_variance")
    rstd = reciprocal_root(variance, epsilon, scope, name)
    return scope.emit(op.multiply(centred, rstd), f"{name}_normalized"), mean, variance, rstd


def affine(x: Expr, scale: Expr | None, offset: Expr | None, scope: Scope, name: str) -> Expr:
    """``x * scale + offset`` in the type of ``x``, against which both broadcast; ``None`` is skipped."""
    if scale is not None:
        scale = cast(scale, dtype(x), scope, f"{name}_scale")
        x = scope.emit(op.multiply(x, scale), f"{name}_scaled")
    if offset is not None:
        offset = cast(offset, dtype(x), scope, f"{name}_offset")
        x = scope.emit(op.add(x, offset), f"{name}_shifted")
    return x
