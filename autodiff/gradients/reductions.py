"""Gradients of reductions, cumulative sums and softmax."""

from __future__ import annotations

import math

from tvm.relax import op

from autodiff.body import size
from autodiff.extents import Dim
from autodiff.gradients.registry import Emit, gradient, keep_axes
from autodiff.ir import Call, Expr, Var, axes_of, dtype, is_float, shape

__all__ = []


@gradient("relax.sum")
def sum_(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g broadcast along the reduced axes"""
    (x,) = call.args
    return [op.broadcast_to(keep_axes(g, call, emit), shape(x))]


@gradient("relax.mean", wide=True)
def mean(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g / n broadcast along the reduced axes"""
    (x,) = call.args
    scaled = emit(g / size(_count(call), g))
    return [op.broadcast_to(keep_axes(scaled, call, emit), shape(x))]


@gradient("relax.max", "relax.min")
def extremum(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g / count where x = y, with count the number of equal extrema (ties share evenly); nan where y is nan"""
    (x,) = call.args
    if not shape(x):
        return [g]
    hit = emit(op.equal(x, keep_axes(y, call, emit)))
    wide = "float64" if dtype(x) == "float64" else "float32"  # counts in half types would be inexact
    count = emit(op.sum(op.astype(hit, wide), axes_of(call), keepdims=True))
    # a product, as in PyTorch: an infinite gradient is nan where x is no extremum
    shared = emit(op.astype(hit, wide) * op.astype(keep_axes(g, call, emit), wide))
    return [op.astype(shared / count, dtype(x))]


@gradient("relax.cumsum", wide=True)
def cumsum(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx_k = sum over i >= k of g_i (i > k if exclusive): the sum from the other end"""
    (x,) = call.args
    if not (is_float(x) and is_float(y)):
        return [None]
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(shape(g))
    summed = op.flip(op.cumsum(op.flip(g, axis), axis, exclusive=bool(call.attrs.exclusive)), axis)
    return [op.astype(emit(op.reshape(summed, shape(x))), dtype(x))]


@gradient("relax.nn.softmax", wide=True)
def softmax(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = y (g - sum(g y))"""
    inner = emit(op.sum(g * y, [_axis(call)], keepdims=True))
    return [(g - inner) * y]


@gradient("relax.nn.log_softmax", wide=True)
def log_softmax(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g - exp(y) sum(g)"""
    total = emit(op.sum(g, [_axis(call)], keepdims=True))
    return [g - op.exp(y) * total]


def _axis(call: Call) -> int:
    return int(call.attrs.axis) % len(shape(call.args[0]))


def _count(call: Call) -> Dim:
    return math.prod(shape(call.args[0])[axis] for axis in axes_of(call))
