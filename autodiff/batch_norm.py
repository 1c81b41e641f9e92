"""BatchNorm decomposition: a call -> mean, centred variance, rstd, multiply, add, and the running averages."""

from __future__ import annotations

from tvm.relax import op

from autodiff.constants import const
from autodiff.group_norm import per_channel
from autodiff.ir import Call, Expr, Tuple, Var, dtype, shape
from autodiff.normalization import affine, cast, normalize, reciprocal_root, statistics_dtype
from autodiff.rewrite import Scope

__all__ = ["spell_batch_norm"]


def spell_batch_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.batch_norm`` becomes mean, centred variance, rstd, multiply and add, and the running averages.

    Safe: it is the operator's definition (Ioffe and Szegedy, 2015), float32 statistics for half types. NOTE: TVM's
    operator averages the *biased* variance, and so does this; PyTorch averages the unbiased one.
    """
    x, gamma, beta, running_mean, running_variance = call.args
    attrs = call.attrs
    axis, epsilon, momentum = int(attrs.axis), float(attrs.epsilon), float(attrs.momentum)
    gamma = gamma if attrs.scale else None
    beta = beta if attrs.center else None
    if not attrs.training:
        y = _inference(x, gamma, beta, running_mean, running_variance, axis, epsilon, scope)
        return Tuple([y, running_mean, running_variance])
    y, mean, variance = _training(x, gamma, beta, axis, epsilon, scope)
    new_mean = _running_average(running_mean, mean, momentum, scope, "running_mean")
    new_variance = _running_average(running_variance, variance, momentum, scope, "running_variance")
    return Tuple([y, new_mean, new_variance])


def _training(
    x: Expr, gamma: Expr | None, beta: Expr | None, axis: int, epsilon: float, scope: Scope, name: str = "batch_norm"
) -> tuple[Expr, Var, Var]:
    """Binds BatchNorm of ``x`` with batch statistics; returns it with mean and biased variance, one per channel.

    ``gamma`` and ``beta`` have one element per channel (``axis``) or are ``None``. The statistics are vectors, in
    float32 for half types.
    """
    extents = list(shape(x))
    axis %= len(extents)
    wide = cast(x, statistics_dtype(dtype(x)), scope, f"{name}_wide")
    others = [other for other in range(len(extents)) if other != axis]
    y, mean, variance, _ = normalize(wide, others, epsilon, scope, name)
    vectors = [scope.emit(op.reshape(value, [extents[axis]]), value.name) for value in (mean, variance)]
    gamma, beta = (per_channel(value, axis, extents, scope, name) for value in (gamma, beta))
    y = affine(y, gamma, beta, scope, name)
    return cast(y, dtype(x), scope, f"{name}_output"), *vectors


def _inference(
    x: Expr,
    gamma: Expr | None,
    beta: Expr | None,
    mean: Expr,
    variance: Expr,
    axis: int,
    epsilon: float,
    scope: Scope,
    name: str = "batch_norm",
) -> Expr:
    """Binds ``(x - mean) / sqrt(variance + epsilon) * gamma + beta`` with given statistics, one per channel."""
    extents = list(shape(x))
    axis %= len(extents)
    wide = cast(x, statistics_dtype(dtype(x)), scope, f"{name}_wide")
    mean, variance = (cast(value, dtype(wide), scope, f"{name}_statistic") for value in (mean, variance))
    rstd = reciprocal_root(variance, epsilon, scope, name)
    mean, rstd, gamma, beta = (per_channel(value, axis, extents, scope, name) for value in (mean, rstd, gamma, beta))
    centred = scope.emit(op.subtract(wide, mean), f"{name}_centred")
    y = scope.emit(op.multiply(centred, rstd), f"{name}_normalized")
    y = affine(y, gamma, beta, scope, name)
    return cast(y, dtype(x), scope, f"{name}_output")


def _running_average(running: Expr, batch: Expr, momentum: float, scope: Scope, name: str) -> Expr:
    """Binds ``(1 - momentum) * running + momentum * batch``, in the type of ``running``."""
    wide = cast(running, dtype(batch), scope, f"{name}_wide")
    remaining = scope.emit(op.multiply(wide, const(1 - momentum, batch)), f"{name}_remaining")
    new = scope.emit(op.multiply(batch, const(momentum, batch)), f"{name}_new")
    average = scope.emit(op.add(remaining, new), f"{name}_average")
    return cast(average, dtype(running), scope, f"{name}_output")
