"""GroupNorm and InstanceNorm decomposition: a call -> mean, centred variance, rstd, multiply and add."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.relax import op

from autodiff.ir import Call, Expr, dtype, shape
from autodiff.normalization import affine, cast, normalize, statistics_dtype
from autodiff.rewrite import Scope

__all__ = ["per_channel", "spell_group_norm", "spell_instance_norm"]


def spell_group_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.group_norm`` becomes reshape to groups, mean, centred variance, rstd, reshape, multiply and add.

    Safe: it is the definition (Wu and He, 2018), with float32 statistics for half types.
    """
    x, gamma, beta = call.args
    attrs = call.attrs
    return _group_norm(
        x,
        gamma if attrs.scale else None,
        beta if attrs.center else None,
        int(attrs.num_groups),
        int(attrs.channel_axis),
        [int(axis) for axis in attrs.axes],
        float(attrs.epsilon),
        scope,
    )


def spell_instance_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.instance_norm`` becomes mean, centred variance, rstd, multiply and add.

    Safe: it is the definition (Ulyanov et al., 2016), with float32 statistics for half types.
    """
    x, gamma, beta = call.args
    attrs = call.attrs
    return _instance_norm(
        x,
        gamma if attrs.scale else None,
        beta if attrs.center else None,
        int(attrs.channel_axis),
        [int(axis) for axis in attrs.axes],
        float(attrs.epsilon),
        scope,
    )


def _group_norm(
    x: Expr,
    gamma: Expr | None,
    beta: Expr | None,
    num_groups: int,
    channel_axis: int,
    axes: Sequence[int],
    epsilon: float,
    scope: Scope,
    name: str = "group_norm",
) -> Expr:
    """Binds GroupNorm of ``x``, and returns it.

    The channels are split into ``num_groups``; statistics are over the channels of a group and over ``axes`` (other
    axes than the channel's). ``gamma`` and ``beta`` have one element per channel or are ``None``.
    """
    extents = list(shape(x))
    channel = channel_axis % len(extents)
    if extents[channel] % num_groups:
        raise ValueError(f"group_norm: wanted channels divisible by {num_groups} groups, got {extents[channel]}")
    grouped = [*extents[:channel], num_groups, extents[channel] // num_groups, *extents[channel + 1 :]]
    reduced = {axis % len(extents) for axis in axes} - {channel}
    reduced = sorted([channel + 1, *(axis + (axis > channel) for axis in reduced)])
    wide = cast(x, statistics_dtype(dtype(x)), scope, f"{name}_wide")
    groups = scope.emit(op.reshape(wide, grouped), f"{name}_groups")
    y, *_ = normalize(groups, reduced, epsilon, scope, name)
    y = scope.emit(op.reshape(y, extents), f"{name}_ungrouped")
    gamma, beta = (per_channel(value, channel, extents, scope, name) for value in (gamma, beta))
    y = affine(y, gamma, beta, scope, name)
    return cast(y, dtype(x), scope, f"{name}_output")


def _instance_norm(
    x: Expr,
    gamma: Expr | None,
    beta: Expr | None,
    channel_axis: int,
    axes: Sequence[int],
    epsilon: float,
    scope: Scope,
    name: str = "instance_norm",
) -> Expr:
    """Binds InstanceNorm of ``x`` over ``axes``, and returns it.

    ``gamma`` and ``beta`` have one element per channel or are ``None``.
    """
    extents = list(shape(x))
    channel = channel_axis % len(extents)
    wide = cast(x, statistics_dtype(dtype(x)), scope, f"{name}_wide")
    y, *_ = normalize(wide, sorted(axis % len(extents) for axis in axes), epsilon, scope, name)
    gamma, beta = (per_channel(value, channel, extents, scope, name) for value in (gamma, beta))
    y = affine(y, gamma, beta, scope, name)
    return cast(y, dtype(x), scope, f"{name}_output")


def per_channel(value: Expr | None, channel: int, extents: Sequence[int], scope: Scope, name: str) -> Expr | None:
    """A vector with one element per channel, reshaped so that it broadcasts along axis ``channel``."""
    if value is None or channel == len(extents) - 1:
        return value
    return scope.emit(op.reshape(value, [extents[channel]] + [1] * (len(extents) - channel - 1)), f"{name}_channel")
