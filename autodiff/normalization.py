"""Decomposition of normalizations: Layer-, Batch-, Group-, Instance- and RMSNorm -> statistics, multiply and add.

Folding before differentiation: bindings -> bindings with one call per normalization. The chain-rule gradient of
``y = (x - mean) * rstd`` reads the centred values *and* ``y``. As one function of ``x``, its gradient reads ``y`` and
``rstd`` alone (see :mod:`autodiff.gradients.linalg`): one wide tensor less for the backward, and fewer operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from autodiff.body import Body, Scope, const, on_functions, rewrite
from autodiff.extents import Dim, same_shape
from autodiff.ir import Call, Constant, Expr, Tuple, Var, dtype, numpy_value, op_name, shape
from autodiff.library import call as library_call
from autodiff.redundancy import live_bindings

__all__ = ["affine", "cast", "fold_normalizations", "layer_norm", "normalize", "per_channel", "reciprocal_root"]
__all__ += ["spell_batch_norm", "spell_group_norm", "spell_instance_norm", "spell_layer_norm", "spell_out"]
__all__ += ["spell_rms_norm", "statistics_dtype"]


def statistics_dtype(element_type: str) -> str:
    """The type in which means and variances are computed: float32 for half types, else the element type itself."""
    return "float32" if element_type in ("float16", "bfloat16") else element_type


def cast(value: Expr, element_type: str, scope: Scope, name: str) -> Expr:
    """``value`` cast to ``element_type``; unchanged if it has that type already."""
    return value if dtype(value) == element_type else scope.emit(op.astype(value, element_type), name)


def reciprocal_root(moment: Expr, epsilon: float, scope: Scope, name: str) -> Var:
    """``rstd = 1 / sqrt(moment + epsilon)``: one variable, whose gradient reads only the variable itself."""
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
    """``value`` with axes of size 1 inserted, so that it broadcasts where its axes are not the last ones."""
    if value is None or same_shape(shape(value), along):
        return value
    return scope.emit(op.reshape(value, along), f"{name}_spread")


def spell_group_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.group_norm`` becomes reshape to groups, mean, centred variance, rstd, reshape, multiply and add.

    Statistics are over the channels of a group and the operator's axes, which exclude the channel axis.
    Safe: it is the definition (Wu and He, 2018), with float32 statistics for half types.
    """
    extents, groups = list(shape(call.args[0])), int(call.attrs.num_groups)
    channel = int(call.attrs.channel_axis) % len(extents)
    if extents[channel] % groups:
        raise ValueError(f"group_norm: wanted channels divisible by {groups} groups, got {extents[channel]}")
    grouped = [*extents[:channel], groups, extents[channel] // groups, *extents[channel + 1 :]]
    axes = {int(axis) % len(extents) for axis in call.attrs.axes} - {channel}
    return _channel_norm(call, [channel + 1, *(axis + (axis > channel) for axis in axes)], grouped, scope, "group_norm")


def spell_instance_norm(call: Call, scope: Scope) -> Expr:
    """``relax.nn.instance_norm`` becomes mean, centred variance, rstd, multiply and add.

    Safe: it is the definition (Ulyanov et al., 2016), with float32 statistics for half types.
    """
    rank = len(shape(call.args[0]))
    return _channel_norm(call, [int(axis) % rank for axis in call.attrs.axes], None, scope, "instance_norm")


def _channel_norm(call: Call, axes: Sequence[int], grouped: list[Dim] | None, scope: Scope, name: str) -> Expr:
    """Normalization of ``x`` (reshaped to ``grouped``, if given) over ``axes``, then a scale and offset per channel."""
    x, gamma, beta = call.args
    extents, attrs = list(shape(x)), call.attrs
    y = cast(x, statistics_dtype(dtype(x)), scope, f"{name}_wide")
    y = y if grouped is None else scope.emit(op.reshape(y, grouped), f"{name}_groups")
    y, *_ = normalize(y, sorted(axes), float(attrs.epsilon), scope, name)
    y = y if grouped is None else scope.emit(op.reshape(y, extents), f"{name}_ungrouped")
    channel = int(attrs.channel_axis) % len(extents)
    parameters = gamma if attrs.scale else None, beta if attrs.center else None
    gamma, beta = (per_channel(value, channel, extents, scope, name) for value in parameters)
    return cast(affine(y, gamma, beta, scope, name), dtype(x), scope, f"{name}_output")


def per_channel(value: Expr | None, channel: int, extents: Sequence[int], scope: Scope, name: str) -> Expr | None:
    """A vector with one element per channel, reshaped so that it broadcasts along axis ``channel``."""
    if value is None or channel == len(extents) - 1:
        return value
    return scope.emit(op.reshape(value, [extents[channel]] + [1] * (len(extents) - channel - 1)), f"{name}_channel")


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


SPELLINGS = {
    "relax.nn.layer_norm": [spell_layer_norm],
    "relax.nn.batch_norm": [spell_batch_norm],
    "relax.nn.group_norm": [spell_group_norm],
    "relax.nn.instance_norm": [spell_instance_norm],
    "relax.nn.rms_norm": [spell_rms_norm],
}


@on_functions
def spell_out(body: Body) -> None:
    """Replaces normalizations by mean, centred variance, rstd, multiply and add.

    Safe: these are the definitions. Why: TVM has no gradients for them, and row statistics are smaller to save.
    """
    rewrite(body, SPELLINGS)


#: The name of the step, ``library.normalize``. Only the function that TVM's ``Gradient`` sees has it; it never runs.
_FOLDED = "normalize"

Bindings = list[tuple[Var, Expr]]


def fold_normalizations(body: Bindings, result: Expr) -> Bindings:
    """Replaces ``y = c * rstd``, ``rstd = rsqrt(mean(c * c) + epsilon)``, by one call on the tensor it normalizes.

    That tensor is ``x`` where ``c = x - mean(x)`` over the same axes (LayerNorm, GroupNorm, BatchNorm), else ``c``
    (RMSNorm). Statistics that other bindings read stay, and keep the gradient through those bindings. Bindings that
    only ``y`` read are dropped.

    Safe: variables hold the same values; the call has the derivative of the expression that it replaces.

    Args:
        body: bindings in flat form.
        result: the variable that they compute.
    """
    definitions = dict(body)
    calls = {var: call for var, value in body if (call := _fold(var, value, definitions)) is not None}
    return live_bindings([(var, calls.get(var, value)) for var, value in body], [result]) if calls else body


def _fold(var: Var, value: Expr, definitions: dict[Var, Expr]) -> Call | None:
    if op_name(value) != "relax.multiply":
        return None
    for scaled, rstd in (value.args, reversed(value.args)):
        axes = _root_of_squares(scaled, rstd, definitions)
        if axes is None:
            continue
        source = _centred_from(scaled, axes, definitions)
        args = [scaled if source is None else source, rstd, relax.prim_value(int(source is not None))]
        return library_call(_FOLDED, args, var.ty)
    return None


def _root_of_squares(scaled: Expr, rstd: Expr, definitions: dict[Var, Expr]) -> list[int] | None:
    """The axes, if ``rstd`` is ``rsqrt(mean(scaled * scaled, axes, keepdims=True) + a number)``, else ``None``."""
    root = _call("relax.rsqrt", rstd, definitions)
    if root is None or not isinstance(scaled, Var):
        return None
    moment = root.args[0]
    shifted = _call("relax.add", moment, definitions)
    if shifted is not None:
        left, right = shifted.args
        moment = left if _is_number(right) else right if _is_number(left) else moment
    mean = _call("relax.mean", moment, definitions)
    if mean is None or not mean.attrs.keepdims:
        return None
    return _axes(mean) if _is_square_of(scaled, mean.args[0], definitions) else None


def _is_square_of(base: Var, value: Expr, definitions: dict[Var, Expr]) -> bool:
    call = definitions.get(value) if isinstance(value, Var) else None
    name = op_name(call) if call is not None else None
    if name == "relax.square":
        return call.args[0].same_as(base)
    if name == "relax.multiply":
        return all(arg.same_as(base) for arg in call.args)
    if name == "relax.power":
        return call.args[0].same_as(base) and _is_number(call.args[1]) and numpy_value(call.args[1]).item() == 2
    return False


def _centred_from(value: Var, axes: Sequence[int], definitions: dict[Var, Expr]) -> Expr | None:
    """``x``, if ``value`` is ``x - mean(x, axes, keepdims=True)``, else ``None``."""
    difference = _call("relax.subtract", value, definitions)
    if difference is None:
        return None
    source, offset = difference.args
    mean = _call("relax.mean", offset, definitions)
    if mean is None or not mean.attrs.keepdims or not isinstance(source, Var) or not mean.args[0].same_as(source):
        return None
    return source if _axes(mean) == axes else None


def _call(name: str, value: Expr, definitions: dict[Var, Expr]) -> Call | None:
    """A variable's definition if it is a call of the named operator, else ``None``."""
    found = definitions.get(value) if isinstance(value, Var) else None
    return found if found is not None and op_name(found) == name else None


def _axes(mean: Call) -> list[int]:
    rank = len(shape(mean.args[0]))
    return list(range(rank)) if mean.attrs.axis is None else sorted(int(axis) % rank for axis in mean.attrs.axis)


def _is_number(value: Expr) -> bool:
    return isinstance(value, Constant) and numpy_value(value).size == 1
