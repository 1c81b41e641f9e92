"""Reductions and softmax → Relax, in eager's accumulation types."""

from __future__ import annotations

import math

from tvm import relax

from autodiff.ir import dtype, is_float, shape
from bridge.aten.derivative import with_slope
from bridge.aten.registry import UnsupportedUse, converts, rounds_once
from bridge.aten.whole import whole
from bridge.base.torch_internals import aten

op = relax.op


def axes_of(x, dims) -> list[int]:
    """Non-negative, sorted axes; ``None`` or ``[]`` mean all, as in torch."""
    rank = len(shape(x))
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return sorted(d % rank for d in dims) if rank else []


def reduce(importer, make, x, dims, keepdim):
    """Emits a reduction over ``dims``; of a 0-d tensor it is the tensor itself."""
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
    """Less the largest, which has no share in the gradient: what it adds in one place it takes away in another."""
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


@converts(aten.amax.default)
def amax(importer, node, x, dims=(), keepdim=False):
    if dtype(x) == "bool":
        return any_(importer, node, x, dims, keepdim)
    return reduce(importer, op.max, x, dims, keepdim)


@converts(aten.amin.default)
def amin(importer, node, x, dims=(), keepdim=False):
    if dtype(x) == "bool":
        return all_(importer, node, x, dims, keepdim)
    return reduce(importer, op.min, x, dims, keepdim)


@converts(aten.any.dim, aten.any.dims, aten.any.default)
def any_(importer, node, x, dims=None, keepdim=False):
    counted = importer.cast(importer.cast(x, "bool"), "int64")
    found = importer.cast(reduce(importer, op.sum, counted, dims, keepdim), "bool")
    return importer.cast(found, importer.out_dtype(node))  # of uint8 it is uint8


@converts(aten.all.dim, aten.all.dims, aten.all.default)
def all_(importer, node, x, dims=None, keepdim=False):
    zeros = importer.cast(importer.emit(op.logical_not(importer.cast(x, "bool"))), "int64")
    some = importer.cast(reduce(importer, op.sum, zeros, dims, keepdim), "bool")
    return importer.cast(importer.emit(op.logical_not(some)), importer.out_dtype(node))


def _degenerate(x, dim, correction) -> bool:
    """Whether there are too few elements for a variance."""
    axes = axes_of(x, dim)
    return not axes or math.prod(shape(x)[axis] for axis in axes) <= (1 if correction is None else correction)


def _from_the_first(importer, x, axes):
    """``x`` less its first element along ``axes``: equal elements have a variance of exactly zero then, as in torch.

    The gradient of a deviation jumps there: from zero to that of what rounding makes of the mean of equal numbers.
    """
    first = importer.emit(op.strided_slice(x, axes, [0] * len(axes), [1] * len(axes), [1] * len(axes)))
    first = importer.emit(op.grad.no_grad(first))
    finite = importer.emit(op.where(importer.emit(op.isfinite(first)), first, importer.constant(0, dtype(x))))
    return importer.emit(op.subtract(x, finite))


@converts(aten.var.correction)
@rounds_once
def var(importer, node, x, dim=None, *, correction=1, keepdim=False):
    if _degenerate(x, dim, correction):
        return whole(importer, node, x, dim, correction=correction, keepdim=keepdim)
    axes = axes_of(x, dim)
    count = math.prod(shape(x)[axis] for axis in axes)
    correction = 1 if correction is None else correction
    biased = reduce(importer, op.variance, _from_the_first(importer, x, axes), axes, keepdim)
    return importer.emit(op.multiply(biased, importer.constant(count / (count - correction), dtype(x))))


@converts(aten.var_mean.correction)
@rounds_once
def var_mean(importer, node, x, dim=None, *, correction=1, keepdim=False):
    variance = var(importer, node, x, dim, correction=correction, keepdim=keepdim)
    return variance if isinstance(variance, tuple) else (variance, reduce(importer, op.mean, x, dim, keepdim))


@converts(aten.std.correction)
@rounds_once
def std(importer, node, x, dim=None, *, correction=1, keepdim=False):
    """Where the variance is zero the gradient is zero, as torch has it."""
    if _degenerate(x, dim, correction):
        return whole(importer, node, x, dim, correction=correction, keepdim=keepdim)
    return _root(importer, var(importer, node, x, dim, correction=correction, keepdim=keepdim), op.sqrt)


@converts(aten.std_mean.correction)
@rounds_once
def std_mean(importer, node, x, dim=None, *, correction=1, keepdim=False):
    deviation = std(importer, node, x, dim, correction=correction, keepdim=keepdim)
    return deviation if isinstance(deviation, tuple) else (deviation, reduce(importer, op.mean, x, dim, keepdim))


def _root(importer, total, root, keeps_nan=False):
    """``root`` of a sum of squares, and zero, with a gradient of zero, where the sum is zero.

    With ``keeps_nan`` that is zero times what comes in: nan for an infinite gradient.
    """
    zero = importer.constant(0, dtype(total))
    nothing = importer.emit(op.equal(total, zero))
    none = importer.emit(op.multiply(total, zero)) if keeps_nan else zero
    safe = importer.emit(op.where(nothing, importer.constant(1, dtype(total)), total))
    return importer.emit(op.where(nothing, none, importer.emit(root(safe))))


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
    """Where the norm is zero its gradient is zero, as torch has it."""
    if ord == 0:
        raise UnsupportedUse("a norm of order 0: eager has no gradient there, not even zeros", "write (x != 0).sum()")
    if abs(ord) == float("inf") or ord < 1:
        return whole(importer, node, x, ord, dim, keepdim, dtype=dtype)
    (x,) = importer.operands(node, x)
    size = importer.emit(op.abs(x))
    if ord == 1:
        return reduce(importer, op.sum, size, dim, keepdim)
    element_type = importer.out_dtype(node)
    exponent = importer.constant(float(ord), element_type)
    powers = op.multiply(x, x) if ord == 2 else op.power(size, exponent)
    total = reduce(importer, op.sum, importer.emit(powers), dim, keepdim)
    if ord == 2:
        return _root(importer, total, op.sqrt, keeps_nan=True)
    return _root(importer, total, lambda safe: op.power(safe, importer.constant(1 / ord, element_type)))
