"""Gradients of operators that move, repeat or drop elements."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from tvm.relax import op

from autodiff.extents import Dim, Extent, Slice, same
from autodiff.gradients.registry import Emit, checks, fit, gradient, padded
from autodiff.ir import Call, Expr, Tuple, TupleGetItem, Var, extents_of, inverse, permutation, shape
from autodiff.typed import slices

__all__ = []


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


@gradient("relax.stack")
def stack(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx_i = g[i] along the new axis"""
    fields = call.args[0].ty.fields
    axis = int(call.attrs.axis) % len(shape(y))
    if len(fields) == 1:  # a split into one part is no tuple
        return [Tuple([op.squeeze(g, axis)])]
    parts = emit(op.split(g, len(fields), axis))
    return [Tuple([op.squeeze(TupleGetItem(parts, index), axis) for index in range(len(fields))])]


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
