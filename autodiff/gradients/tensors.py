"""Gradients of operators on whole tensors: moves and repetitions, gathers, reductions and softmax, matrix products and
a normalization as one step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from tvm.relax import op

from autodiff.body import size
from autodiff.extents import Dim, Extent, Slice, same, same_shape
from autodiff.gradients.registry import (
    Emit,
    checks,
    const,
    fit,
    gradient,
    keep_axes,
    padded,
    zeros_like,
)
from autodiff.ir import (
    Call,
    Expr,
    Tuple,
    Var,
    axes_of,
    dtype,
    extents_of,
    inverse,
    is_float,
    permutation,
    shape,
)
from autodiff.typed import slices


@gradient("relax.reshape", "relax.squeeze", "relax.expand_dims", "relax.flatten", "relax.nn.batch_flatten")
def same_elements(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g in the shape of x"""
    x, *extents = call.args
    return [op.reshape(g, shape(x))] + [None] * len(extents)


@gradient("relax.permute_dims")
def permute_dims(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g in the order of the axes of x"""
    return [op.permute_dims(g, inverse(permutation(call)) if call.attrs.axes else None)]


@gradient("relax.split")
def split(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = the sections' gradients, one after the other"""
    return [op.concat(g, int(call.attrs.axis))]


@gradient("relax.broadcast_to")
def broadcast_to(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g summed over the new and the stretched dimensions"""
    return [fit(g, call.args[0], emit), None]


@gradient("relax.concat")
def concat(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx_i = the section of g that x_i is"""
    axis = int(call.attrs.axis or 0) % len(shape(y))
    sizes = [extents_of(field)[axis] for field in call.args[0].ty.fields]
    ends = list(itertools.accumulate(sizes))
    if not any(isinstance(end, Extent) for end in ends[:-1]):
        return [op.split(g, ends[:-1], int(call.attrs.axis or 0))]
    return [Tuple([op.strided_slice(g, [axis], [end - size], [end]) for end, size in zip(ends, sizes, strict=True)])]


@gradient("relax.flip")
def flip(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = flip(g)"""
    return [op.flip(g, call.attrs.axis)]


@gradient("relax.strided_slice")
def strided_slice(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g at the positions of the slice"""
    extents = shape(call.args[0])
    value: Expr = g
    for axis, cut in slices(call):
        value = _scatter_slice(value, cut, axis, extents[axis], emit)
    return [value] + [None] * (len(call.args) - 1)


def _scatter_slice(value: Expr, cut: Slice, axis: int, extent: Dim, emit: Emit) -> Expr:
    """Zeros of ``extent`` along ``axis``, with ``value`` at the positions of a slice: spread, then padded."""
    value = emit(value)
    if cut.is_all_of(extent):
        return value
    extents = list(shape(value))
    if same(cut.length, 0):
        return op.zeros([*extents[:axis], extent, *extents[axis + 1 :]], value.ty.dtype)
    first, last, step = cut.begin, cut.last, cut.step
    if step < 0:
        value, first, last, step = emit(op.flip(value, axis)), last, first, -step
    if step > 1 and not same(cut.length, 1):
        spread = emit(op.reshape(value, [*extents[: axis + 1], 1, *extents[axis + 1 :]]))
        spread = emit(padded(spread, axis + 1, 0, step - 1, emit))
        value = emit(op.reshape(spread, [*extents[:axis], extents[axis] * step, *extents[axis + 1 :]]))
        length = (cut.length - 1) * step + 1
        value = emit(op.strided_slice(value, [axis], [0], [length]))  # no zeros after the last element
    return emit(padded(value, axis, first, extent - 1 - last, emit))


@gradient("relax.nn.pad")
def pad(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g without the padding"""
    (x,) = call.args
    begins = [int(width) for width in call.attrs.pad_width][::2]
    axes = list(range(len(shape(x))))
    ends = [begin + extent for begin, extent in zip(begins, shape(x), strict=True)]
    return [op.strided_slice(g, axes, begins, ends)]


@checks("relax.nn.pad")
def check_pad(call: Call, active: Collection[Var]) -> str | None:
    """Reflected and repeated elements would have to be summed."""
    mode = str(call.attrs.pad_mode)
    return None if mode == "constant" else f"wanted pad_mode 'constant', got {mode!r}"


@gradient("relax.gather_elements")
def gather_elements(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added at the indices; where a row has one index, as in a loss, 0 + g there and 0 elsewhere"""
    x, indices = call.args
    extents, wanted = shape(x), shape(indices)
    axis = int(call.attrs.axis) % len(extents)
    others = [same(a, b) for place, (a, b) in enumerate(zip(extents, wanted, strict=True)) if place != axis]
    if not (same(wanted[axis], 1) and all(others)):
        return [op.scatter_elements(zeros_like(x), indices, g, axis, "add"), None]
    along = [extents[axis], *[1] * (len(extents) - axis - 1)]
    # int32 where the extent fits: the forward has refused every index out of range
    type_of_index = "int32" if isinstance(extents[axis], int) and extents[axis] < 2**31 else "int64"
    places = emit(op.reshape(op.arange(0, extents[axis], 1, type_of_index), along))
    if dtype(indices) != type_of_index:
        indices = emit(op.astype(indices, type_of_index))
    return [op.where(op.equal(indices, places), emit(op.add(g, const(0, g))), const(0, g)), None]


@gradient("relax.scatter_elements")
def scatter_elements(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g, zero where overwritten; dupdates = g at the indices (for 'update' and 'add')"""
    _, indices, updates = call.args
    axis, reduction = int(call.attrs.axis), str(call.attrs.reduction)
    dx = g if reduction == "add" else op.scatter_elements(g, indices, zeros_like(updates), axis, "update")
    gathered = g
    for other, (extent, wanted) in enumerate(zip(shape(g), shape(indices), strict=True)):
        if other != axis % len(shape(g)) and not same(extent, wanted):  # indices may be smaller than the data
            gathered = emit(op.strided_slice(gathered, [other], [0], [wanted]))
    return [dx, None, op.gather_elements(gathered, indices, axis)]


@checks("relax.scatter_elements")
def check_scatter(call: Call, active: Collection[Var]) -> str | None:
    """Products and extrema of colliding updates have no rule."""
    reduction = str(call.attrs.reduction)
    return None if reduction in ("add", "update") else f"wanted the reduction 'add' or 'update', got {reduction!r}"


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


@gradient("relax.matmul")
def matmul(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b^T, db = a^T g; where b is a matrix, db is one product of two matrices, all rows of a batch together"""
    a, b = call.args
    if dtype(g) != dtype(a):  # a wider out_dtype
        g = emit(op.astype(g, dtype(a)))
    left = a if len(shape(a)) > 1 else emit(op.reshape(a, (1, *shape(a))))
    right = b if len(shape(b)) > 1 else emit(op.reshape(b, (*shape(b), 1)))
    batch = shape(g)[: max(len(shape(left)), len(shape(right))) - 2]
    product = emit(op.reshape(g, (*batch, shape(left)[-2], shape(right)[-1])))
    da = _of_shape(fit(op.matmul(product, _transposed(right, emit)), left, emit), a, emit)
    if len(shape(right)) > 2:
        return [da, _of_shape(fit(op.matmul(_transposed(left, emit), product), right, emit), b, emit)]
    db = op.matmul(_transposed(_as_matrix(left, emit), emit), _as_matrix(product, emit))
    # Not bound here: TVM folds the transpose of a weight into a product that it finds unbound.
    return [da, db if len(shape(b)) == 2 else op.reshape(emit(db), shape(b))]


def _of_shape(x: Expr, like: Expr, emit: Emit) -> Expr:
    x = emit(x)
    return x if same_shape(shape(x), shape(like)) else op.reshape(x, shape(like))


def _transposed(x: Expr, emit: Emit) -> Expr:
    rank = len(shape(x))
    return emit(op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2]))


def _as_matrix(x: Expr, emit: Emit) -> Expr:
    *rows, columns = shape(x)
    return x if len(rows) == 1 else emit(op.reshape(x, (math.prod(rows), columns)))


@gradient("library.normalize", wide=True)
def normalize(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = rstd (g - mean(g) - y mean(g y)), where y = (x - mean(x)) rstd; without mean(g) where y = x rstd

    ``rstd`` keeps the reduced axes as size 1, and may be summed over any other axis of that size.
    """
    _, rstd, centred = call.args
    axes = [axis for axis, extent in enumerate(shape(rstd)) if same(extent, 1)]
    slope = emit(op.mean(emit(g * y), axes, keepdims=True))
    if not int(centred.value):
        return [rstd * (g - y * slope), None, None]
    offset = emit(op.mean(g, axes, keepdims=True))
    return [rstd * (emit(g - offset) - y * slope), None, None]
