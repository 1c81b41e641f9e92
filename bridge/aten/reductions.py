"""Reductions, softmax and matrix products → Relax, in eager's accumulation types."""

from __future__ import annotations

import math

from tvm import relax

from autodiff.extents import broadcast, same_shape
from autodiff.ir import Expr, compute_type, dtype, is_float, shape
from bridge.aten.activations import times, where, with_derivative, with_slope
from bridge.aten.any_operator import whole
from bridge.aten.registry import converts, rounds_once
from bridge.base.devices import HOST, current_device
from bridge.base.torch_internals import aten, schema

op = relax.op


def axes_of(x, dims) -> list[int]:
    """Non-negative, sorted axes; ``None`` or ``[]`` mean all, as in torch."""
    rank = len(shape(x))
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return sorted(d % rank for d in dims) if rank else []


def reduce(importer, make, x, dims, keepdim):
    """Emits a reduction over ``dims``; a 0-d tensor stays itself."""
    axes = axes_of(x, dims)
    return importer.emit(make(x, axis=axes, keepdims=bool(keepdim))) if axes else x


@converts(aten.sum.dim_IntList, aten.sum.default)
def sum_(importer, node, x, dims=None, keepdim=False, *, dtype=None):
    (x,) = importer.operands(node, x)
    return reduce(importer, op.sum, x, dims, keepdim)


@converts(aten.nansum.default)
def nansum(importer, node, x, dims=None, keepdim=False, *, dtype=None):
    """dx = g where x is a number, g times zero where it is nan"""
    (x,) = importer.operands(node, x)
    if not is_float(x):
        return reduce(importer, op.sum, x, dims, keepdim)
    there = importer.emit(op.equal(x, x))
    value = importer.emit(op.where(there, x, importer.constant(0, importer.out_dtype(node))))
    value = with_slope(importer, value, x, op.astype(there, importer.out_dtype(node)))
    return reduce(importer, op.sum, value, dims, keepdim)


@converts(aten.logsumexp.default)
def logsumexp(importer, node, x, dims, keepdim=False):
    """Subtracts the maximum, whose gradient contributions cancel and are left out."""
    (x,) = importer.operands(node, x)
    element_type = importer.out_dtype(node)
    largest = importer.emit(op.grad.no_grad(reduce(importer, op.max, x, dims, True)))
    infinite = importer.emit(op.equal(importer.emit(op.abs(largest)), importer.constant(math.inf, element_type)))
    largest = importer.emit(op.where(infinite, importer.constant(0, element_type), largest))
    powers = importer.emit(op.exp(importer.emit(op.subtract(x, largest))))
    total = importer.emit(op.log(reduce(importer, op.sum, powers, dims, keepdim)))
    return importer.emit(op.add(total, importer.reshape(largest, shape(total))))


@converts(aten.mean.dim, aten.mean.default)
def mean(importer, node, x, dims=None, keepdim=False, *, dtype=None):
    (x,) = importer.operands(node, x)
    return reduce(importer, op.mean, x, dims, keepdim)


@converts(aten.amax.default, aten.amin.default)
def extremum(importer, node, x, dims=(), keepdim=False):
    make, of_bools = (op.max, any_) if node.target is aten.amax.default else (op.min, all_)
    if dtype(x) == "bool":
        return of_bools(importer, node, x, dims, keepdim)
    return reduce(importer, make, x, dims, keepdim)


@converts(aten.any.dim, aten.any.dims, aten.any.default, aten._is_any_true.default)
def any_(importer, node, x, dims=None, keepdim=False):
    counted = importer.cast(importer.cast(x, "bool"), "int64")
    found = importer.cast(reduce(importer, op.sum, counted, dims, keepdim), "bool")
    return importer.cast(found, importer.out_dtype(node))  # uint8 for uint8


@converts(aten.all.dim, aten.all.dims, aten.all.default, aten._is_all_true.default)
def all_(importer, node, x, dims=None, keepdim=False):
    zeros = importer.cast(importer.emit(op.logical_not(importer.cast(x, "bool"))), "int64")
    some = importer.cast(reduce(importer, op.sum, zeros, dims, keepdim), "bool")
    return importer.cast(importer.emit(op.logical_not(some)), importer.out_dtype(node))


def _degenerate(x, dim, correction) -> bool:
    """Whether there are too few elements for a variance."""
    axes = axes_of(x, dim)
    return not axes or math.prod(shape(x)[axis] for axis in axes) <= (1 if correction is None else correction)


def _moments(importer, x, dim, correction, keepdim):
    """Variance and mean over ``dim`` with torch's derivatives: sums in float64, as in its kernel.

    dx = g 2 / (n - correction) (x - mean). Squares of float32 neither overflow nor vanish in float64, and the mean of
    equal numbers is that number, so that their variance is zero. Where the variance is nan, so is the mean.
    """
    axes, stored = axes_of(x, dim), dtype(x)
    count = math.prod(shape(x)[axis] for axis in axes)
    degrees = count - (1 if correction is None else correction)
    wide = importer.cast(x, "float64")
    first = _first(importer, wide, axes) if stored == "float64" else importer.constant(0, "float64")
    from_first = importer.emit(op.subtract(wide, first))
    offset = importer.emit(op.mean(from_first, axis=axes, keepdims=True))
    centred = importer.emit(op.subtract(from_first, offset))
    total = importer.emit(op.sum(importer.emit(op.multiply(centred, centred)), axis=axes, keepdims=True))
    variance = importer.emit(op.divide(total, importer.constant(degrees, "float64")))
    centre = importer.emit(op.add(offset, first))
    distance = op.subtract(x, importer.cast(centre, stored))
    centre = where(importer, op.not_equal(variance, variance), variance, centre)
    moment = reduce(importer, op.sum, times(importer, x, distance), dim, keepdim)
    linear = importer.emit(op.multiply(moment, importer.ratio(2, degrees, stored)))
    variance, centre = (importer.reshape(each, shape(linear)) for each in (variance, centre))
    mean_of = with_derivative(importer, importer.cast(centre, stored), reduce(importer, op.mean, x, dim, keepdim))
    return variance, linear, mean_of


def _first(importer, x, axes):
    """The first element along ``axes``, 0 where it is not finite; equal elements minus it are exactly zero."""
    first = importer.slice(x, axes, [0] * len(axes), [1] * len(axes))
    return where(importer, op.isfinite(first), first, importer.constant(0, dtype(x)))


def _deviation(importer, variance, linear, stored):
    """The root of a variance in float64; dx = (g / (2 y)) times the variance's gradient, 0 where y is 0."""
    y = importer.cast(importer.emit(op.sqrt(variance)), stored)
    flat = importer.emit(op.equal(y, importer.constant(0, stored)))
    twice = importer.emit(op.multiply(y, importer.constant(2, stored)))
    divisor = importer.emit(op.grad.no_grad(where(importer, flat, importer.constant(1, stored), twice)))
    linear = where(importer, flat, op.grad.no_grad(linear), op.divide(linear, divisor))
    return with_derivative(importer, y, linear)


@converts(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
@rounds_once
def spread(importer, node, x, dim=None, *, correction=1, keepdim=False):
    """``var``, ``std``, ``var_mean`` and ``std_mean``."""
    if _degenerate(x, dim, correction):
        return whole(importer, node, x, dim, correction=correction, keepdim=keepdim)
    name, stored = schema(node.target).name.removeprefix("aten::"), dtype(x)
    variance, linear, mean = _moments(importer, x, dim, correction, keepdim)
    if name.startswith("std"):
        result = _deviation(importer, variance, linear, stored)
    else:
        result = with_derivative(importer, importer.cast(variance, stored), linear)
    return (result, mean) if name.endswith("_mean") else result


def _root(importer, total, root):
    """``root`` of a sum of powers; where the sum is zero, the value and its gradient are zero."""
    zero = importer.constant(0, dtype(total))
    nothing = importer.emit(op.equal(total, zero))
    safe = importer.emit(op.where(nothing, importer.constant(1, dtype(total)), total))
    return importer.emit(op.where(nothing, zero, importer.emit(root(safe))))


@converts(aten._softmax.default, aten._log_softmax.default)
def softmax(importer, node, x, dim, half_to_float):
    (x,) = importer.operands(node, x)
    if not shape(x):
        x = importer.reshape(x, (1,))
        dim = 0
    make = op.nn.softmax if node.target is aten._softmax.default else op.nn.log_softmax
    return importer.reshape(importer.emit(make(x, dim % len(shape(x)))), importer.out(node).shape)


@converts(aten._safe_softmax.default)
def safe_softmax(importer, node, x, dim, *, dtype=None):
    """Softmax that is zero, and has a gradient of zero, along rows of nothing but -inf."""
    (x,) = importer.operands(node, x)
    if not shape(x):
        return whole(importer, node, x, dim)
    dim %= len(shape(x))
    low = importer.emit(op.max(x, axis=[dim], keepdims=True))
    element_type = importer.out_dtype(node)
    empty = importer.emit(op.equal(low, importer.constant(float("-inf"), element_type)))
    zero = importer.constant(0, element_type)
    y = importer.emit(op.nn.softmax(importer.emit(op.where(empty, zero, x)), dim))
    return importer.emit(op.where(empty, zero, y))


@converts(aten.cumsum.default)
def cumsum(importer, node, x, dim, *, dtype=None):
    (x,) = importer.operands(node, x)
    return importer.emit(op.cumsum(x, axis=dim % len(shape(x)))) if shape(x) else x


@converts(aten.linalg_vector_norm.default)
@rounds_once
def vector_norm(importer, node, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """Where the norm is zero its gradient is zero, as in torch."""
    if abs(ord) == float("inf") or ord < 1:
        return whole(importer, node, x, ord, dim, keepdim, dtype=dtype)
    (x,) = importer.operands(node, x)
    if ord == 2:
        return euclidean_norm(importer, x, dim, keepdim)
    if ord != 1 and _of_one(x, dim):
        return reduce(importer, op.sum, _size(importer, x, ord), dim, keepdim)
    size = importer.emit(op.abs(x))
    if ord == 1:
        return reduce(importer, op.sum, size, dim, keepdim)
    element_type = importer.out_dtype(node)
    powers = importer.emit(op.power(size, importer.constant(float(ord), element_type)))
    total = reduce(importer, op.sum, powers, dim, keepdim)
    return _root(importer, total, lambda safe: op.power(safe, importer.constant(1 / ord, element_type)))


def euclidean_norm(importer, x, dims, keepdims):
    """The root of the sum of squares, in the type of ``x``; dx = x (g / y), but x (0 g) where y is zero."""
    if _of_one(x, dims):
        return reduce(importer, op.sum, _size(importer, x, 2), dims, keepdims)
    y = importer.emit(op.sqrt(reduce(importer, op.sum, importer.emit(op.multiply(x, x)), dims, keepdims)))
    zero, one = (importer.constant(number, dtype(x)) for number in (0, 1))
    flat, along = importer.emit(op.equal(y, zero)), reduce(importer, op.sum, times(importer, x, x), dims, keepdims)
    divisor = importer.emit(op.grad.no_grad(where(importer, flat, one, y)))
    return with_derivative(importer, y, where(importer, flat, op.multiply(along, zero), op.divide(along, divisor)))


def _of_one(x, dims):
    """Whether a norm along ``dims`` is an absolute value, as in torch (squares may overflow); not for axis 0 of a 0-d
    tensor."""
    if not shape(x) and (isinstance(dims, int) or dims):
        return False
    return math.prod(shape(x)[axis] for axis in axes_of(x, dims)) == 1


def _size(importer, x, order):
    """The absolute value of each element, with torch's gradient of its norm: ``x |x|^(p-2) / |x|^(p-1)``.

    That is zero at zero, nan at infinity, and unless ``p`` is 2 nan wherever a power overflows or vanishes.
    """
    size = importer.emit(op.abs(x))
    zero = importer.constant(0, dtype(x))
    slope, divisor = x, size
    if order != 2:
        slope, divisor = (op.power(size, importer.constant(float(order - less), dtype(x))) for less in (2, 1))
        slope, divisor = importer.emit(op.multiply(x, importer.emit(slope))), importer.emit(divisor)
    quotient = importer.emit(op.divide(slope, divisor))
    return with_slope(importer, size, x, where(importer, op.equal(x, zero), zero, quotient))


@converts(aten.cosine_similarity.default)
def cosine_similarity(importer, node, a, b, dim=1, eps=1e-8):
    """The sum of products of normalized rows; the gradient ignores the lower bound of the norms."""
    extents = broadcast([shape(a), shape(b)])
    a, b = (_normalized(importer, importer.expand(each, extents), dim, eps) for each in importer.operands(node, a, b))
    return reduce(importer, op.sum, importer.emit(op.multiply(a, b)), dim, False)


def _normalized(importer, x, dim, eps):
    stored = dtype(x)
    if _of_one(x, [dim]):
        norm = _size(importer, x, 2)
    else:
        wide = importer.cast(x, compute_type(stored))
        norm = importer.cast(euclidean_norm(importer, wide, dim, True), stored)
    bounded = importer.emit(op.maximum(norm, importer.constant(eps, stored)))
    return importer.emit(op.divide(x, with_derivative(importer, bounded, norm)))


@converts(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def matmul(importer, node, x, y):
    if "float" not in dtype(x):
        return whole(importer, node, x, y)
    return importer.emit(op.matmul(x, y))


@converts(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def addmm(importer, node, bias, x, y, *, beta=1, alpha=1):
    if "float" not in dtype(x) or alpha == 0:  # torch's kernels differ in whether 0 times nan or inf is computed
        return whole(importer, node, bias, x, y, beta=beta, alpha=alpha)
    if is_rounded_once(x) and len(shape(x)) == len(shape(y)) == 2 and len(shape(bias)) < 2 and alpha == beta == 1:
        return _with_row(importer, node, x, y, bias)
    combined = _combined(importer, matmul(importer, node, x, y), bias, beta, alpha)
    return _in_one_kernel(importer, combined, node, bias, x, y, beta=beta, alpha=alpha)


@converts(aten.addbmm.default)
def addbmm(importer, node, bias, x, y, *, beta=1, alpha=1):
    if "float" not in dtype(x) or alpha == 0:
        return whole(importer, node, bias, x, y, beta=beta, alpha=alpha)
    product = importer.emit(op.sum(matmul(importer, node, x, y), axis=[0]))
    combined = _combined(importer, product, bias, beta, alpha)
    return _in_one_kernel(importer, combined, node, bias, x, y, beta=beta, alpha=alpha)


def is_rounded_once(x: Expr) -> bool:
    """Whether torch's kernels round a product of this type after they add the bias, and a sum of two operators would
    round before it too: half types on the host. On a GPU, bias epilogues are fused later, where they are fast."""
    return current_device() == HOST and compute_type(dtype(x)) != dtype(x)


def _in_one_kernel(importer, combined, node, *args, **kwargs):
    """``combined``; where that is rounded more often than torch's kernel is, the kernel's value with its gradients."""
    if not is_rounded_once(combined):
        return combined
    return with_derivative(importer, whole(importer, node, *args, **kwargs), combined)


def _with_row(importer, node, rows, columns, bias):
    """``rows @ columns + bias``, a number or one number per column, in the node's shape."""
    width = shape(columns)[1:]
    if not same_shape(shape(bias), width):
        bias = importer.emit(op.broadcast_to(bias, width))
    out = importer.out(node)
    return importer.library("matmul_bias", [rows, columns, bias, tuple(out.shape)], out)


def _combined(importer, product, bias, beta, alpha):
    if alpha != 1:
        product = importer.emit(op.multiply(product, importer.constant(alpha, dtype(product))))
    if beta == 0:  # torch ignores the addend, nan and inf included
        return product
    if beta != 1:
        bias = importer.emit(op.multiply(bias, importer.constant(beta, dtype(bias))))
    return importer.emit(op.add(product, bias))


@converts(aten.linear.default)
def linear(importer, node, x, weight, bias=None):
    if "float" not in dtype(x):
        return whole(importer, node, x, weight, bias)
    # one 2-d product, so that the weight's gradient is one 2-d product too
    *leading, features = shape(x)
    rows = importer.reshape(x, (math.prod(leading), features))
    is_vector = len(shape(weight)) == 1  # one output feature, for which the result has no axis
    columns = importer.reshape(weight, (features, 1)) if is_vector else importer.emit(op.permute_dims(weight, [1, 0]))
    product = importer.reshape(importer.emit(op.matmul(rows, columns)), (*leading, *shape(weight)[:-1]))
    return product if bias is None else importer.emit(op.add(product, bias))
