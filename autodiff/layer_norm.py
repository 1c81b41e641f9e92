"""LayerNorm decomposition: a call -> mean, centred variance, rstd, multiply and add."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.relax import op

from autodiff.extents import Dim, same_shape
from autodiff.ir import Call, Expr, dtype, shape
from autodiff.normalization import affine, cast, normalize, statistics_dtype
from autodiff.rewrite import Scope

__all__ = ["layer_norm", "spell_layer_norm"]


def spell_layer_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.layer_norm`` becomes mean, centred variance, rstd, multiply and add.

    Safe: it is the definition (Ba et al., 2016), with the biased variance computed from centred values, in float32
    for half types.
    """
    x, gamma, beta = call.args
    attrs = call.attrs
    return layer_norm(
        x,
        gamma if attrs.scale else None,
        beta if attrs.center else None,
        [int(axis) for axis in attrs.axes],
        float(attrs.epsilon),
        scope,
    )


def layer_norm(
    x: Expr,
    gamma: Expr | None,
    beta: Expr | None,
    axes: Sequence[int],
    epsilon: float,
    scope: Scope,
    name: str = "layer_norm",
) -> Expr:
    """Binds LayerNorm of ``x`` over ``axes``, and returns it.

    ``gamma`` and ``beta`` have the extents of ``x`` along ``axes``, in that order, or are ``None``. The result has the
    element type of ``x``; the statistics are in float32 for half types. (TVM's own operator refuses bfloat16.)
    """
    rank = len(shape(x))
    axes = sorted(axis % rank for axis in axes)
    wide = cast(x, statistics_dtype(dtype(x)), scope, f"{name}_wide")
    y, *_ = normalize(wide, axes, epsilon, scope, name)
    along = [shape(x)[axis] if axis in axes else 1 for axis in range(axes[0], rank)]
    gamma, beta = (_spread(value, along, scope, name) for value in (gamma, beta))
    y = affine(y, gamma, beta, scope, name)
    return cast(y, dtype(x), scope, f"{name}_output")


def _spread(value: Expr | None, along: list[Dim], scope: Scope, name: str) -> Expr | None:
    """``value`` with size-1 dims where its axes are not adjacent to the end, so that it broadcasts."""
    if value is None or same_shape(shape(value), along):
        return value
    return scope.emit(op.reshape(value, along), f"{name}_spread")
