"""Gradients of losses and pooling."""

from __future__ import annotations

import math
from collections.abc import Collection

from tvm.relax import op

from autodiff.constants import ratio
from autodiff.gradients.registry import Emit, checks, gradient
from autodiff.gradients.tools import const, sum_over
from autodiff.ir import Call, Expr, Var, dtype, shape

__all__ = []


@gradient("relax.nn.nll_loss", wide=True)
def nll_loss(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx[n, c, ..] = -g w[c] where c is the target, else 0; divided by the sum of the weights used for 'mean'.

    TVM's own rule reads the weight of a negative ``ignore_index`` (such as -100) out of bounds.
    """
    x, targets, *weights = call.args
    reduction = str(call.attrs.reduction)
    axis = 1 if len(shape(x)) > 1 else 0
    classes = shape(x)[axis]
    valid = emit(op.not_equal(targets, const(int(call.attrs.ignore_index), targets)))
    safe = emit(op.where(valid, targets, const(0, targets)))
    weight = emit(op.take(weights[0], safe, axis=0)) if weights else const(1, x)
    used = emit(op.where(valid, weight, const(0, x)))
    scaled = op.negative(g) * used
    if reduction == "mean":
        count = sum_over(used, range(len(shape(used))), emit) if shape(used) else used
        scaled = op.where(valid, scaled / count, const(0, x))
    scaled = emit(scaled)
    spread = [*shape(targets)[:axis], 1, *shape(targets)[axis:]]
    index = [classes] + [1] * (len(shape(x)) - axis - 1)
    labels = op.astype(emit(op.reshape(op.arange(0, classes, 1, "int64"), index)), dtype(targets))
    hit = op.equal(op.reshape(safe, spread), labels)
    return [op.where(hit, op.reshape(scaled, spread), const(0, x)), None] + [None] * len(weights)


@checks("relax.nn.nll_loss")
def check_nll_loss(call: Call, active: Collection[Var]) -> str | None:
    """Class weights are constants of the loss."""
    if any(arg in active for arg in call.args[2:] if isinstance(arg, Var)):
        return "the loss has no gradient with respect to its class weights"
    return None


_ADAPTIVE = tuple(f"relax.nn.adaptive_avg_pool{rank}d" for rank in (1, 2, 3))


@gradient(*_ADAPTIVE, wide=True)
def adaptive_avg_pool(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g / n repeated over each window of n elements; windows of one size only"""
    (x,) = call.args
    extents, windows = shape(x)[2:], shape(y)[2:]
    sizes = [extent // count for extent, count in zip(extents, windows, strict=True)]
    narrow = [size for count in windows for size in (count, 1)]
    wide = [size for pair in zip(windows, sizes, strict=True) for size in pair]
    shared = emit(g * ratio(1, math.prod(sizes), g))
    spread = emit(op.broadcast_to(op.reshape(shared, [*shape(x)[:2], *narrow]), [*shape(x)[:2], *wide]))
    return [op.reshape(spread, shape(x))]


@checks(*_ADAPTIVE)
def check_adaptive_avg_pool(call: Call, active: Collection[Var]) -> str | None:
    """Overlapping windows have no rule."""
    layout = str(call.attrs.layout)
    if layout not in ("NCW", "NCHW", "NCDHW"):
        return f"wanted channels first, got the layout {layout}"
    extents = shape(call.args[0])[2:]
    counts = [int(size) for size in call.attrs.output_size] if call.attrs.output_size is not None else list(extents)
    if any(extent % count for extent, count in zip(extents, counts, strict=True)):
        return f"wanted windows of one size, got {counts} windows for {list(extents)} elements"
    return None


@checks("relax.nn.max_pool2d", "relax.nn.avg_pool2d")
def check_pool(call: Call, active: Collection[Var]) -> str | None:
    """TVM's backward operators know no dilation."""
    dilation = [int(step) for step in call.attrs.dilation]
    return None if set(dilation) == {1} else f"wanted dilation 1, got {dilation}"
