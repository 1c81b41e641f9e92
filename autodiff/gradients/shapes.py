"""Gradients of operators that move, repeat or drop elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from tvm.relax import op

from autodiff.extents import Dim, Extent, Slice, same
from autodiff.gradients.registry import Emit, checks, fit, gradient, padded, sum_over, zeros_like
from autodiff.ir import Call, Expr, Tuple, TupleGetItem, Var, extents_of, shape
from autodiff.typed import slices

__all__ = []


@gradient("relax.reshape")
def reshape(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g in the shape of x"""
    return [op.reshape(g, shape(call.args[0])), None]


@gradient("relax.squeeze", "relax.expand_dims", "relax.flatten", "relax.nn.batch_flatten")
def same_elements(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g in the shape of x"""
    return [op.reshape(g, shape(call.args[0]))]


@gradient("relax.broadcast_to")
def broadcast_to(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g summed over the new and the stretched dimensions"""
    return [fit(g, call.args[0], emit), None]


@gradient("relax.collapse_sum_to")
def collapse_sum_to(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g broadcast to the shape of x"""
    return [op.broadcast_to(g, shape(call.args[0])), None]


@gradient("relax.collapse_sum_like")
def collapse_sum_like(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g broadcast to the shape of x"""
    return [op.broadcast_to(g, shape(call.args[0])), None]


@gradient("relax.concat")
def concat(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx_i = the section of g that x_i is"""
    axis = int(call.attrs.axis or 0) % len(shape(y))
    sizes = [extents_of(field)[axis] for field in call.args[0].ty.fields]
    ends = list(itertools.accumulate(sizes))
    if not any(isinstance(end, Extent) for end in ends[:-1]):
        return [op.split(g, ends[:-1], int(call.attrs.axis or 0))]
    return [Tuple([op.strided_slice(g, [axis], [end - size], [end]) for end, size in zip(ends, sizes, strict=True)])]


@gradient("relax.stack")
def stack(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx_i = g[i] along the new axis"""
    fields = call.args[0].ty.fields
    axis = int(call.attrs.axis) % len(shape(y))
    if len(fields) == 1:  # a split into one part is no tuple
        return [Tuple([op.squeeze(g, axis)])]
    parts = emit(op.split(g, len(fields), axis))
    return [Tuple([op.squeeze(TupleGetItem(parts, index), axis) for index in range(len(fields))])]


@gradient("relax.tril")
def tril(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = tril(g, k)"""
    return [op.tril(g, call.args[1]), None]


@gradient("relax.triu")
def triu(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = triu(g, k) (TVM's own rule forgets that k is an argument and fails)"""
    return [op.triu(g, call.args[1]), None]


@gradient("relax.flip")
def flip(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = flip(g)"""
    return [op.flip(g, call.attrs.axis)]


@gradient("relax.tile")
def tile(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = sum of the copies of g"""
    (x,) = call.args
    rank = len(shape(y))
    extents = [1] * (rank - len(shape(x))) + list(shape(x))
    copies = [size // extent if extent else 1 for size, extent in zip(shape(y), extents, strict=True)]
    split = emit(op.reshape(g, [size for pair in zip(copies, extents, strict=True) for size in pair]))
    summed = sum_over(split, range(0, 2 * rank, 2), emit)
    return [op.reshape(summed, shape(x))]


@gradient("relax.repeat")
def repeat(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = sum of the repeated elements of g"""
    (x,) = call.args
    repeats = int(call.attrs.repeats)
    if call.attrs.axis is None:
        split = emit(op.reshape(g, [math.prod(shape(x)), repeats]))
        return [op.reshape(sum_over(split, [1], emit), shape(x))]
    axis = int(call.attrs.axis) % len(shape(x))
    split = emit(op.reshape(g, [*shape(x)[: axis + 1], repeats, *shape(x)[axis + 1 :]]))
    return [sum_over(split, [axis + 1], emit)]


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


@gradient("relax.slice_scatter")
def slice_scatter(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g with zeros at the slice; dsource = g at the slice"""
    _, source, start, end, step = call.args
    axis = int(call.attrs.axis)
    dx = op.slice_scatter(g, zeros_like(source), start, end, step, axis)
    return [dx, op.strided_slice(g, [axis], [start], [end], [step]), None, None, None]


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


@gradient("relax.reverse_sequence")
def reverse_sequence(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = reverse_sequence(g)"""
    attrs = call.attrs
    return [op.reverse_sequence(g, call.args[1], int(attrs.seq_axis), int(attrs.batch_axis)), None]


@gradient("relax.meshgrid")
def meshgrid(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx_i = sum of g_i over the other axes"""
    fields = call.args[0].ty.fields
    order = list(range(len(fields)))
    if call.attrs.indexing == "xy" and len(order) > 1:
        order[:2] = order[1], order[0]
    partials = []
    for index, axis in enumerate(order):
        part = emit(TupleGetItem(g, index))
        summed = sum_over(part, [other for other in order if other != axis], emit)
        partials.append(op.reshape(summed, fields[index].shape))
    return [Tuple(partials)]
