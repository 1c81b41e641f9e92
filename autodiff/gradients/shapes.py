"""Gradients of operators that move, repeat or drop elements."""

from __future__ import annotations

import math
from collections.abc import Collection

from tvm.relax import op

from autodiff.gradients.registry import Emit, checks, gradient
from autodiff.gradients.tools import fit, sum_over, zeros_like
from autodiff.ir import Call, Expr, Tuple, TupleGetItem, Var, shape

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
    x, axes, begins, ends, *strides = call.args
    value: Expr = g
    strides = [int(stride) for stride in strides[0].fields] if strides else [1] * len(axes.fields)
    for axis, begin, end, stride in zip(axes.fields, begins.fields, ends.fields, strides, strict=True):
        axis = int(axis) % len(shape(x))
        extent = shape(x)[axis]
        positions = range(*slice(int(begin), int(end), stride).indices(extent))
        value = _scatter_slice(value, positions, axis, extent, emit)
    return [value] + [None] * (len(call.args) - 1)


def _scatter_slice(value: Expr, positions: range, axis: int, extent: int, emit: Emit) -> Expr:
    """Zeros of ``extent`` along ``axis``, with ``value`` at ``positions``: spread, then padded."""
    value = emit(value)
    if positions == range(extent):
        return value
    extents = list(shape(value))
    if not positions:
        return op.zeros([*extents[:axis], extent, *extents[axis + 1 :]], value.ty.dtype)
    if positions.step < 0:
        value, positions = emit(op.flip(value, axis)), positions[::-1]
    step = positions.step if len(positions) > 1 else 1
    if step > 1:
        spread = emit(op.reshape(value, [*extents[: axis + 1], 1, *extents[axis + 1 :]]))
        spread = emit(_pad(spread, axis + 1, 0, step - 1))
        value = emit(op.reshape(spread, [*extents[:axis], extents[axis] * step, *extents[axis + 1 :]]))
        length = (len(positions) - 1) * step + 1
        value = emit(op.strided_slice(value, [axis], [0], [length]))  # no zeros after the last element
    return emit(_pad(value, axis, positions[0], extent - 1 - positions[-1]))


def _pad(value: Expr, axis: int, before: int, after: int) -> Expr:
    widths = [0] * (2 * len(shape(value)))
    widths[2 * axis : 2 * axis + 2] = before, after
    return op.nn.pad(value, widths)


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
        partials.append(op.reshape(summed, [int(extent) for extent in fields[index].shape]))
    return [Tuple(partials)]
