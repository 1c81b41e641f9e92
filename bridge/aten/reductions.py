"""Reductions and softmax."""

from __future__ import annotations

import torch
from tvm import relax

from autodiff.ir import dtype, is_float, numel, shape
from bridge.aten.registry import Refused, converts

aten = torch.ops.aten
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


@converts(aten.mean.dim, aten.mean.default)
def mean(importer, node, x, dims=None, keepdim=False, *, dtype=None):
    (x,) = importer.operands(node, x)
    return reduce(importer, op.mean, x, dims, keepdim)


@converts(aten.amax.default)
def amax(importer, node, x, dims=(), keepdim=False):
    return reduce(importer, op.max, x, dims, keepdim)


@converts(aten.amin.default)
def amin(importer, node, x, dims=(), keepdim=False):
    return reduce(importer, op.min, x, dims, keepdim)


@converts(aten.any.dim, aten.any.dims, aten.any.default)
def any_(importer, node, x, dims=None, keepdim=False):
    counted = importer.cast(importer.cast(x, "bool"), "int64")
    return importer.cast(reduce(importer, op.sum, counted, dims, keepdim), "bool")


@converts(aten.all.dim, aten.all.dims, aten.all.default)
def all_(importer, node, x, dims=None, keepdim=False):
    zeros = importer.cast(importer.emit(op.logical_not(importer.cast(x, "bool"))), "int64")
    some = importer.cast(reduce(importer, op.sum, zeros, dims, keepdim), "bool")
    return importer.emit(op.logical_not(some))


@converts(aten.var.correction)
def var(importer, node, x, dim=None, *, correction=1, keepdim=False):
    axes = axes_of(x, dim)
    count = 1
    for axis in axes:
        count *= shape(x)[axis]
    correction = 1 if correction is None else correction
    if count - correction <= 0:
        raise Refused(f"variance of {count} values with correction {correction}")
    mean_ = importer.emit(op.mean(x, axis=axes, keepdims=True))
    centred = importer.emit(op.subtract(x, mean_))
    squares = importer.emit(op.multiply(centred, centred))
    total = reduce(importer, op.sum, squares, axes, keepdim)
    return importer.emit(op.divide(total, importer.constant(float(count - correction), dtype(x))))


@converts(aten._softmax.default, aten._log_softmax.default)
def softmax(importer, node, x, dim, half_to_float):
    (x,) = importer.operands(node, x)
    if not shape(x):
        x = importer.reshape(x, (1,))
        dim = 0
    make = op.nn.softmax if node.target is aten._softmax.default else op.nn.log_softmax
    return importer.reshape(importer.emit(make(x, dim % len(shape(x)))), importer.out(node).shape)


@converts(aten.argmax.default, aten.argmin.default)
def argmax(importer, node, x, dim=None, keepdim=False):
    if not is_float(x) and dtype(x) == "bool":
        raise Refused("argmax of booleans")
    make = op.argmax if node.target is aten.argmax.default else op.argmin
    if dim is None:
        x, dim = importer.reshape(x, (numel(x),)), 0
        found = importer.emit(make(x, axis=0, keepdims=False))
        return importer.reshape(found, importer.out(node).shape)
    if not shape(x):
        return importer.filled(importer.out(node), 0)
    return importer.emit(make(x, axis=dim % len(shape(x)), keepdims=bool(keepdim)))


@converts(aten.cumsum.default, aten.cumprod.default)
def cumsum(importer, node, x, dim, *, dtype=None):
    (x,) = importer.operands(node, x)
    make = op.cumsum if node.target is aten.cumsum.default else op.cumprod
    return importer.emit(make(x, axis=dim % len(shape(x)))) if shape(x) else x


@converts(aten.var_mean.correction)
def var_mean(importer, node, x, dim=None, *, correction=1, keepdim=False):
    return (
        var(importer, node, x, dim, correction=correction, keepdim=keepdim),
        reduce(importer, op.mean, x, dim, keepdim),
    )


@converts(aten.max.default, aten.min.default)
def max_of_all(importer, node, x):
    return reduce(importer, op.max if node.target is aten.max.default else op.min, x, None, False)


@converts(aten.prod.default, aten.prod.dim_int)
def prod(importer, node, x, dim=None, keepdim=False, *, dtype=None):
    (x,) = importer.operands(node, x)
    return reduce(importer, op.prod, x, dim, keepdim)


@converts(aten.linalg_vector_norm.default)
def vector_norm(importer, node, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """Of order 0, 1, above 1, inf; where the norm is zero its gradient is zero, as torch has it."""
    (x,) = importer.operands(node, x)
    size = importer.emit(op.abs(x))
    if ord == 0:
        counted = importer.cast(
            importer.emit(op.not_equal(x, importer.constant(0, x.ty.dtype))), importer.out_dtype(node)
        )
        return reduce(importer, op.sum, counted, dim, keepdim)
    if abs(ord) == float("inf"):
        return reduce(importer, op.max if ord > 0 else op.min, size, dim, keepdim)
    if ord == 1:
        return reduce(importer, op.sum, size, dim, keepdim)
    if ord <= 1:
        raise Refused(f"a vector norm of order {ord}")
    element_type = importer.out_dtype(node)
    exponent = importer.constant(float(ord), element_type)
    powers = op.multiply(x, x) if ord == 2 else op.power(size, exponent)
    total = reduce(importer, op.sum, importer.emit(powers), dim, keepdim)
    zero = importer.constant(0, element_type)
    nothing = importer.emit(op.equal(total, zero))
    safe = importer.emit(op.where(nothing, importer.constant(1, element_type), total))
    root = op.sqrt(safe) if ord == 2 else op.power(safe, importer.constant(1 / ord, element_type))
    return importer.emit(op.where(nothing, zero, importer.emit(root)))
