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
