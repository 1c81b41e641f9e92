"""Gradients of reductions, cumulative sums and products, softmax and top-k."""

from __future__ import annotations

import math
from collections.abc import Collection

from tvm.relax import op

from autodiff.body import ratio, size
from autodiff.extents import Dim
from autodiff.gradients.registry import Emit, axes_of, checks, const, gradient, keep_axes, zeros_like
from autodiff.ir import Call, Expr, TupleGetItem, Var, dtype, is_float, shape

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


@gradient("relax.variance", wide=True)
def variance(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g 2 / n (x - mean); TVM's own rule subtracts two large numbers instead of centring first"""
    (x,) = call.args
    scaled = keep_axes(emit(g * ratio(2, _count(call), g)), call, emit)
    return [scaled * (x - op.mean(x, axes_of(call), keepdims=True))]


@gradient("relax.std", wide=True)
def std(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g / (n y) (x - mean), 0 where y = 0"""
    (x,) = call.args
    flat = op.equal(y, const(0, y))
    scaled = emit(op.where(flat, const(0, g), g / (y * size(_count(call), y))))
    return [keep_axes(scaled, call, emit) * (x - op.mean(x, axes_of(call), keepdims=True))]


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


@gradient("relax.prod", wide=True)
def prod(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx_i = g times the product of the other x, exact with zeros: products from the left and from the right"""
    (x,) = call.args
    if not shape(x):
        return [g]
    axes = axes_of(call)
    others = [axis for axis in range(len(shape(x))) if axis not in axes]
    order = [*others, *axes]
    rows = [shape(x)[axis] for axis in others]
    flat = emit(op.reshape(op.permute_dims(x, order), [*rows, _count(call)]))
    last = len(rows)
    rest = emit(_products_before(flat, last) * op.flip(_products_before(op.flip(flat, last), last), last))
    slope = emit(op.permute_dims(op.reshape(rest, [shape(x)[axis] for axis in order]), _inverse(order)))
    return [keep_axes(g, call, emit) * slope]


@gradient("relax.cumprod", wide=True)
def cumprod(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx_k = sum over i >= k of g_i times the product of x_j, j <= i and j != k; exact with zeros, n^2 products"""
    (x,) = call.args
    extents = shape(x)
    axis = call.attrs.axis
    if axis is None:
        x, g, axis = emit(op.reshape(x, [math.prod(extents)])), emit(op.reshape(g, [math.prod(extents)])), 0
    axis = int(axis) % len(shape(x))
    n = shape(x)[axis]
    # [.., k, i, ..]: the product of x_j over k < j <= i
    spread = [*shape(x)[:axis], 1, *shape(x)[axis:]]
    square = [*shape(x)[:axis], n, *shape(x)[axis:]]
    trailing = [1] * (len(shape(x)) - axis - 1)
    k = op.reshape(op.arange(0, n, 1, "int64"), [n, 1, *trailing])
    i = op.reshape(op.arange(0, n, 1, "int64"), [n, *trailing])
    factors = emit(op.where(op.greater(i, k), op.reshape(x, spread), const(1, x)))
    between = emit(op.cumprod(emit(op.broadcast_to(factors, square)), axis + 1))
    gradient_in = _shift_left(g, axis, emit) if call.attrs.exclusive else g
    reached = op.where(op.greater_equal(i, k), between * op.reshape(gradient_in, spread), const(0, x))
    dx = emit(op.sum(reached, [axis + 1]) * _products_before(x, axis))
    return [op.reshape(dx, extents)]


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


@gradient("relax.argmax", "relax.argmin", "relax.argsort")
def positions(call: Call, y: Var, g: Var, emit: Emit) -> list[None]:
    """dx = 0"""
    return [None]


@gradient("relax.topk")
def topk(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = zeros with g at the positions found"""
    (x,) = call.args
    values, found = TupleGetItem(g, 0), TupleGetItem(y, 1)
    return [op.scatter_elements(zeros_like(x), found, values, int(call.attrs.axis), "update")]


@checks("relax.topk")
def check_topk(call: Call, active: Collection[Var]) -> str | None:
    """The gradient needs the positions."""
    kind = str(call.attrs.ret_type)
    return None if kind == "both" else f"wanted ret_type 'both' (the positions are needed), got {kind!r}"


def _axis(call: Call) -> int:
    return int(call.attrs.axis) % len(shape(call.args[0]))


def _count(call: Call) -> Dim:
    return math.prod(shape(call.args[0])[axis] for axis in axes_of(call))


def _products_before(x: Expr, axis: int) -> Expr:
    """At each position the product of the elements before it, 1 at the first."""
    return op.cumprod(x, axis, exclusive=True)


def _shift_left(g: Expr, axis: int, emit: Emit) -> Expr:
    """Element i + 1 at i, zero at the end: the gradient of the inclusive products behind exclusive ones."""
    g = emit(g)
    n = shape(g)[axis]
    widths = [0] * (2 * len(shape(g)))
    widths[2 * axis + 1] = 1
    return emit(op.nn.pad(op.strided_slice(g, [axis], [1], [n]), widths))


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
