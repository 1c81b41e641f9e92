"""RMSNorm decomposition: a call -> mean of squares, rstd and multiply."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.relax import op

from autodiff.ir import Call, Expr, dtype, shape
from autodiff.normalization import affine, cast, reciprocal_root, statistics_dtype
from autodiff.rewrite import Scope

__all__ = ["spell_rms_norm"]


def spell_rms_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.rms_norm`` becomes mean of squares, rstd and multiply.

    Safe: it is the definition (Zhang and Sennrich, 2019), computed in float32 for half types.
    """
    x, weight = call.args
    return _rms_norm(x, weight, [int(axis) for axis in call.attrs.axes], float(call.attrs.epsilon), scope)


def _rms_norm(
    x: Expr, weight: Expr | None, axes: Sequence[int], epsilon: float, scope: Scope, name: str = "rms_norm"
) -> Expr:
    """Binds ``x / sqrt(mean(x^2, axes) + epsilon) * weight``, and returns it.

    ``weight`` has the extents of ``x`` along ``axes``, which are the last axes, or is ``None``. The result has the
    element type of ``x``.
    """
    rank = len(shape(x))
    axes = sorted(axis % rank for axis in axes)
    if axes != list(range(rank - len(axes), rank)):
        raise ValueError(f"rms_norm: wanted the last axes of a rank-{rank} tensor, got {axes}")
    wide = cast(x, statistics_dtype(dtype(x)), scope, f"{name}_wide")
    squared = scope.emit(op.square(wide), f"{name}_squared")
    moment = scope.emit(op.mean(squared, axes, keepdims=True), f"{name}_moment")
    rstd = reciprocal_root(moment, epsilon, scope, name)
    y = scope.emit(op.multiply(wide, rstd), f"{name}_normalized")
    y = affine(y, weight, None, scope, name)
    return cast(y, dtype(x), scope, f"{name}_output")
