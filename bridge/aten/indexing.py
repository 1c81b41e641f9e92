"""Indexing by tensors and order statistics → library functions and Relax's own gathers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from autodiff.extents import maximum, minimum, same
from autodiff.ir import dtype, numel, shape
from bridge.aten.any_operator import whole
from bridge.aten.registry import UnsupportedUse, converts, has_extents, index_shape, lies_elsewhere, numbers_only
from bridge.base.devices import HOST
from bridge.base.torch_internals import OpOverload, aten, schema
from bridge.capture import TensorMetadata

op = relax.op


@converts(aten.gather.default)
def gather(importer, node, x, dim, index, *, sparse_grad=False):
    if sparse_grad:
        raise UnsupportedUse("sparse gradients", "set sparse_grad=False")
    if 0 in shape(index):
        return importer.filled(importer.out(node), 0)
    index = importer.cast(index, "int64")
    if not shape(x) or not shape(index):  # as if it had one axis, of extent 1
        taken = op.gather_elements(importer.reshape(x, (numel(x),)), importer.reshape(index, (numel(index),)), 0)
        return importer.reshape(importer.emit(taken), importer.out(node).shape)
    dim %= len(shape(x))
    return importer.emit(op.gather_elements(_cut(importer, x, shape(index), dim), index, dim))


@converts(aten.item.default, aten._local_scalar_dense.default)
def item(importer, node, x):
    """A position as a 0-d tensor (:mod:`bridge.capture.select_at`): the tensor itself, as an index of one."""
    if any(user.target not in (aten.select.int, aten.select_scatter.default) for user in node.users):
        raise UnsupportedUse("a number that forward reads, and computes with")
    return importer.cast(x, "int64")


@converts(aten.one_hot.default)
def one_hot(importer, node, index, num_classes=-1):
    """``out[..., c] = (index == c)``; raises eager's errors for classes outside of ``[0, num_classes)``."""
    classes = importer.out(node).shape[-1]
    limits = (op.greater_equal, 0, "non-negative"), (op.less, classes, "smaller than num_classes")
    for allowed, bound, words in limits:
        outside = importer.emit(op.logical_not(importer.emit(allowed(index, importer.constant(bound, dtype(index))))))
        count = importer.emit(op.sum(importer.cast(outside, "int64")))
        none = importer.emit(op.equal(count, importer.constant(0, "int64")))
        importer.assertions.append((none, f"Class values must be {words}."))
    index = importer.reshape(index, (*shape(index), 1))
    return importer.cast(importer.emit(op.equal(index, importer.emit(op.arange(0, classes, 1, dtype(index))))), "int64")


def _cut(importer, x, extents, dim):
    """``x`` cut to the extents of the index along all axes but ``dim``, the indexed one."""
    for axis, extent in enumerate(extents):
        if axis != dim and not same(extent, shape(x)[axis]):
            x = importer.slice(x, [axis], [0], [extent])
    return x


@converts(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(importer, node, x, dim, index, source):
    tensors = [x, index] if isinstance(source, int | float) else [x, index, source]
    index = importer.cast(index, "int64")
    if 0 in shape(index) or not all(len(shape(tensor)) == len(shape(x)) > 0 for tensor in tensors):
        # torch takes () for (1,), and tensors of any rank with an empty index
        return whole(importer, node, x, dim, index, source)
    reduction = "add" if node.target is aten.scatter_add.default else "update"
    if isinstance(source, int | float):
        fill = op.full(shape(index), importer.constant(source, dtype(x)), dtype(x))
        source = importer.emit(fill)
    source = _cut(importer, _cut(importer, source, shape(index), -1), shape(index), -1)
    return importer.emit(op.scatter_elements(x, index, source, dim % len(shape(x)), reduction))


@converts(aten.scatter_reduce.two, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_reduce(importer, node, x, dim, index, *source, **options):
    # some kernels of torch read an expanded int32 index as if it were int64
    return whole(importer, node, x, dim, importer.cast(index, "int64"), *source, **options)


def _positions(indices):
    """The indexed axes and their indices. Boolean indices are unsupported: their result's shape depends on numbers."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [indices[dim] for dim in dims]
    if any(dtype(index) in ("bool", "uint8") for index in given):
        reason = "indexing with a boolean mask: the result's shape depends on its numbers"
        raise UnsupportedUse(reason, "use torch.where")
    return dims, given


@converts(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(importer, node, x, indices):
    dims, given = _positions(indices)
    place = _known_place(importer, node, [shape(x)[dim] for dim in dims])
    if place is None or dims != list(range(dims[0], dims[0] + len(dims))):
        return importer.library("index", [x, dims, given], importer.out(node))
    before, behind = shape(x)[: dims[0]], shape(x)[dims[-1] + 1 :]
    lines = importer.reshape(x, (*before, math.prod(shape(x)[dim] for dim in dims), *behind))
    form = TensorMetadata((*before, len(place), *behind), importer.out(node).dtype)
    taken = importer.library("index_select", [lines, dims[0], relax.const(place, "int64")], form)
    return importer.reshape(taken, importer.out(node).shape)


def _known_place(importer, node, extents):
    """Flat positions within the indexed axes, of an index that depends on no input; else ``None``."""
    known = [_known(importer, index) for index in node.args[1] if index is not None]
    if not known or has_extents(tuple(extents)) or any(each is None or each.dtype != torch.int64 for each in known):
        return None
    places = [each % extent for each, extent in zip(torch.broadcast_tensors(*known), extents, strict=True)]
    return np.ravel_multi_index([each.numpy() for each in places], extents).reshape(-1)


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(importer, node, x, indices, values, accumulate=False):
    if any(index is not None and dtype(index) in ("bool", "uint8") for index in indices):
        return _masked_put(importer, node, x, indices, values, accumulate)
    dims, given = _positions(indices)
    target = index_shape(shape(x), dims, [shape(position) for position in given])
    (values,) = importer.operands(node, values)
    padded = (1,) * (len(target) - len(shape(values))) + shape(values)
    values = importer.expand(importer.reshape(values, padded), target)
    return importer.library("index_put", [x, values, dims, given, bool(accumulate)], importer.out(node))


def _masked_put(importer, node, x, indices, values, accumulate):
    """A mask over the leading axes: one value is a selection, other values are written by torch's kernel."""
    (mask, *others) = indices
    one = numel(values) == 1 and dtype(values) == dtype(x)
    if others or mask is None or dtype(mask) != "bool" or accumulate or not one:
        return whole(importer, node, x, indices, values, accumulate)
    mask = importer.reshape(mask, (*shape(mask), *[1] * (len(shape(x)) - len(shape(mask)))))
    value = importer.reshape(values, (1,) * len(shape(x)))
    return importer.emit(op.where(mask, value, x))


@converts(aten.as_strided_scatter.default)
def as_strided_scatter(importer, node, x, source, size, stride, storage_offset=None):
    # torch's own derivative of it passes the gradient on where the source was written
    positions = _strided_positions(node, size, stride, storage_offset)
    if len(np.unique(positions)) != positions.size:
        raise UnsupportedUse("as_strided_scatter into positions that overlap")
    (source,) = importer.operands(node, source)
    flat = TensorMetadata((numel(x),), importer.out(node).dtype)
    where = relax.const(positions.reshape(-1), "int64")
    values = importer.reshape(source, (positions.size,))
    written = importer.library("index_put", [importer.reshape(x, (numel(x),)), values, [0], [where], False], flat)
    return importer.reshape(written, shape(x))


_MOST_KNOWN = 2**20
"""Number of positions up to which a program holds them as a constant; more are computed at each call."""


def _known(importer, node):
    """An index that depends on no input, as an integer tensor on the host, or ``None``."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "placeholder":
        literal = importer.captured.names.literals.get(node.name)
        return None if literal is None else literal.detach().to(HOST)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or has_extents(tuple(value.shape)):
        return None
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    operands = {each: _known(importer, each) for each in node.all_input_nodes}
    if value.numel() > _MOST_KNOWN or any(each is None for each in operands.values()):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    return node.target(*args, **({**kwargs, "device": HOST} if "device" in kwargs else kwargs))


@converts(aten.index_select.default)
def index_select(importer, node, x, dim, position):
    known = _known(importer, node.args[2])
    if known is not None:
        position = relax.const(known.numpy(), "int64")
    position = importer.reshape(position, (numel(position),))
    if not shape(x):  # as if it had one axis, of extent 1
        fake = importer.out(node).unsqueeze(0)
        return importer.reshape(importer.library("index_select", [importer.reshape(x, (1,)), 0, position], fake), ())
    return importer.library("index_select", [x, dim % len(shape(x)), position], importer.out(node))


@converts(aten.index_add.default, aten.index_copy.default)
def index_add(importer, node, x, dim, position, source, *, alpha=1):
    if not shape(x) or not shape(source):
        return whole(importer, node, x, dim, position, source, **({} if alpha == 1 else {"alpha": alpha}))
    (source,) = importer.operands(node, source)
    if alpha != 1:
        source = importer.emit(op.multiply(source, importer.constant(alpha, dtype(source))))
    name = "index_add" if node.target is aten.index_add.default else "index_copy"
    position = importer.reshape(position, (numel(position),))
    return importer.library(name, [x, dim % len(shape(x)), position, source], importer.out(node))


@converts(aten.index_fill.int_Scalar)
def index_fill(importer, node, x, dim, position, value):
    if not shape(x):
        return whole(importer, node, x, dim, position, value)
    out = importer.out(node)
    extents = list(shape(x))
    extents[dim] = numel(position)
    number = torch.tensor(value, dtype=out.dtype).item()
    values = importer.filled(TensorMetadata(tuple(extents), out.dtype), number)
    position = importer.reshape(position, (numel(position),))
    return importer.library("index_put", [x, values, [dim % len(extents)], [position], False], out)


def _from(importer, start, count):
    """The ``count`` positions from ``start`` on."""
    if has_extents(count):
        return importer.emit(op.arange(start, start + count, 1, "int64"))
    return relax.const(np.arange(count, dtype="int64") + start, "int64")


def _diagonal_positions(importer, x, offset, dim1, dim2):
    rank = len(shape(x))
    dim1, dim2 = dim1 % rank, dim2 % rank
    rest = [axis for axis in range(rank) if axis not in (dim1, dim2)]
    rows, columns = shape(x)[dim1], shape(x)[dim2]
    length = maximum(minimum(rows + min(offset, 0), columns - max(offset, 0)), 0)
    positions = [_from(importer, start, length) for start in (max(-offset, 0), max(offset, 0))]
    return [*rest, dim1, dim2], [rank - 2, rank - 1], positions


@converts(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(importer, node, x, offset=0, dim1=0, dim2=1):
    order, dims, positions = _diagonal_positions(importer, x, offset, dim1, dim2)
    moved = x if order == sorted(order) else importer.emit(op.permute_dims(x, order))
    return importer.library("index", [moved, dims, positions], importer.out(node))


@converts(aten.diagonal_scatter.default)
def diagonal_scatter(importer, node, x, source, offset=0, dim1=0, dim2=1):
    order, dims, positions = _diagonal_positions(importer, x, offset, dim1, dim2)
    moved = importer.emit(op.permute_dims(x, order))
    fake = TensorMetadata(shape(moved), importer.out(node).dtype)
    written = importer.library("index_put", [moved, source, dims, positions, False], fake)
    return importer.emit(op.permute_dims(written, [int(axis) for axis in np.argsort(order)]))


@converts(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(importer, node, x, size, stride, storage_offset=None):
    positions = _strided_positions(node, size, stride, storage_offset)
    flat = importer.reshape(x, (numel(x),))
    return importer.library("index", [flat, [0], [relax.const(positions, "int64")]], importer.out(node))


def _strided_positions(node, size, stride, storage_offset):
    """Places in ``node``'s operand, in row-major order, of the elements that a size, strides and an offset select.

    The operand may be a view, whose strides are eager's (:mod:`bridge.capture.functional` compares them): a place in
    memory is looked for among its elements'.
    """
    fake = node.args[0].meta["val"]
    numbers_only("a geometry in memory", fake.shape, size, stride, storage_offset)
    if isinstance(fake, TensorMetadata):
        raise UnsupportedUse("a geometry in memory where sizes vary", "use slices, permute, expand or unfold")
    start = fake.storage_offset()
    wanted = _in_memory(size, stride, start if storage_offset is None else storage_offset)
    own = _in_memory(fake.shape, fake.stride(), start).reshape(-1)
    order = np.argsort(own, kind="stable")
    place = np.minimum(np.searchsorted(own[order], wanted), own.size - 1)
    if wanted.size and (not own.size or (own[order][place] != wanted).any()):
        raise UnsupportedUse("as_strided outside of the view's own elements", "use slices, permute, expand or unfold")
    if len(np.unique(own)) < own.size:
        raise UnsupportedUse("as_strided of a view whose elements share memory", "use slices, permute or unfold")
    return order[place] if wanted.size else wanted


def _in_memory(size, stride, offset):
    """Places in memory, in row-major order, of the elements of a tensor."""
    places = np.full(tuple(size), offset, dtype="int64")
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        places = places + (np.arange(extent, dtype="int64") * step).reshape([-1] + [1] * (len(size) - 1 - axis))
    return places


def _of_axis(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of (values, positions along an axis): a 0-d tensor is its own value, at position 0."""

    @functools.wraps(convert)
    def converted(importer, node, x, *args, **kwargs):
        if not shape(x):
            return x, importer.filled(node.meta["val"][1], 0)
        return convert(importer, node, x, *args, **kwargs)

    return converted


def _require_device(node):
    """Refuses a host operator in a GPU's call: the two kernels may order equal numbers differently."""
    if lies_elsewhere(node.args[0]):
        hint = "sort it on the GPU, or with stable=True"
        raise UnsupportedUse("an order of equal numbers, on the host beside a GPU's tensors", hint)


def _pair(importer, node, name, args):
    pair = importer.library(name, args, node.meta["val"])
    return importer.item(pair, 0), importer.item(pair, 1)


def _reduced(importer, node, name, x, dim, args, keepdim):
    """A pair that the library returns with the axis kept, of extent 1."""
    forms = node.meta["val"]
    pair = importer.library(name, [x, dim, *args], [each if keepdim else each.unsqueeze(dim) for each in forms])
    return tuple(importer.reshape(importer.item(pair, index), form.shape) for index, form in enumerate(forms))


@converts(aten.sort.default)
def sort(importer, node, x, dim=-1, descending=False):
    return sort_stable(importer, node, x, dim=dim, descending=descending)


@converts(aten.sort.stable)
@_of_axis
def sort_stable(importer, node, x, *, stable=False, dim=-1, descending=False):
    if not stable:
        _require_device(node)
    return _pair(importer, node, "sort", [x, dim % len(shape(x)), bool(descending), bool(stable)])


@converts(aten.topk.default)
@_of_axis
def topk(importer, node, x, k, dim=-1, largest=True, sorted=True):
    numbers_only("top-k", k)
    _require_device(node)
    return _pair(importer, node, "topk", [x, dim % len(shape(x)), k, bool(largest), bool(sorted)])


@converts(aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default)
@_of_axis
def along(importer, node, x, dim=-1, keepdim=False):
    _require_device(node)
    name = schema(node.target).name.removeprefix("aten::") + "_dim"
    return _reduced(importer, node, name, x, dim % len(shape(x)), [], keepdim)


@converts(aten.kthvalue.default)
@_of_axis
def kthvalue(importer, node, x, k, dim=-1, keepdim=False):
    numbers_only("the k-th value", k)
    _require_device(node)
    return _reduced(importer, node, "kthvalue", x, dim % len(shape(x)), [k], keepdim)


@converts(aten.cummax.default, aten.cummin.default)
@_of_axis
def cummax(importer, node, x, dim):
    return _pair(importer, node, schema(node.target).name.removeprefix("aten::"), [x, dim % len(shape(x))])
