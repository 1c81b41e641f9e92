"""Gradients of gathering and scattering: each is the other's gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tvm.relax import op

from autodiff.body import size
from autodiff.extents import Dim, same
from autodiff.gradients.registry import Emit, checks, const, fit, gradient, zeros_like
from autodiff.ir import Call, Expr, Tuple, TupleGetItem, Var, dtype, shape

__all__ = []


@gradient("relax.take")
def take(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added at the indices, which may have any rank"""
    x, indices = call.args[:2]
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(shape(x))
    indices = _in_range(indices, shape(x)[axis], str(call.attrs.mode), emit)
    return [_add_at(shape(x), axis, indices, g, emit)] + [None] * (len(call.args) - 1)


def _add_at(extents: Sequence[Dim], axis: int, indices: Expr, updates: Expr, emit: Emit) -> Expr:
    """Zeros of shape ``extents`` with ``updates`` added at ``indices``, whose axes replace ``axis``."""
    count = math.prod(shape(indices))
    rows = [*extents[:axis], count, *extents[axis + 1 :]]
    column = [1] * axis + [count] + [1] * (len(extents) - axis - 1)
    spread = emit(op.broadcast_to(op.reshape(indices, column), rows))
    return op.scatter_elements(op.zeros(extents, dtype(updates)), spread, op.reshape(updates, rows), axis, "add")


def _in_range(indices: Expr, extent: Dim, mode: str, emit: Emit) -> Expr:
    """Indices out of range -> the indices that ``take`` reads instead (``mode``: wrap or clip)."""
    if mode == "wrap":
        return emit(op.floor_mod(indices, size(extent, indices)))
    if mode == "clip":
        return emit(op.minimum(op.maximum(indices, const(0, indices)), size(extent - 1, indices)))
    return indices


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


@gradient("relax.gather_nd")
def gather_nd(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added at the indices"""
    x, indices = call.args
    return [op.scatter_nd(zeros_like(x), indices, g, "add"), None]


@gradient("relax.scatter_nd")
def scatter_nd(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g, zero where overwritten; dupdates = g at the indices (for 'update' and 'add')"""
    _, indices, updates = call.args
    reduction = str(call.attrs.reduction)
    dx = g if reduction == "add" else op.scatter_nd(g, indices, zeros_like(updates), "update")
    return [dx, None, op.gather_nd(g, indices)]


@gradient("relax.index_tensor")
def index_tensor(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added at the indices: one row number for the leading axes that are indexed"""
    x, indices = call.args
    count = len(indices.ty.fields)
    lead, rest = shape(x)[:count], shape(x)[count:]
    row: Expr | None = None
    for axis, extent in enumerate(lead):
        index = indices.fields[axis] if isinstance(indices, Tuple) else emit(TupleGetItem(indices, axis))
        index = emit(op.astype(index, "int64"))
        index = emit(op.where(op.less(index, const(0, index)), index + size(extent, index), index))
        row = index if row is None else emit(row * size(extent, row) + index)
    added = emit(_add_at([math.prod(lead), *rest], 0, row, g, emit))
    return [op.reshape(added, shape(x)), None]


@gradient("relax.index_put")
def index_put(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g, zero where overwritten; dvalues = g at the indices"""
    _, indices, values = call.args
    accumulate = bool(call.attrs.accumulate)
    dx = g if accumulate else op.index_put(g, indices, zeros_like(values), accumulate=False)
    return [dx, None, fit(op.index_tensor(g, indices), values, emit)]


@gradient("relax.one_hot", "relax.bucketize")
def from_integers(call: Call, y: Var, g: Var, emit: Emit) -> list[None]:
    """dx = 0"""
    return [None] * len(call.args)


@checks("relax.scatter_elements", "relax.scatter_nd")
def check_scatter(call: Call, active: Collection[Var]) -> str | None:
    """Products and extrema of colliding updates have no rule."""
    reduction = str(call.attrs.reduction)
    return None if reduction in ("add", "update") else f"wanted the reduction 'add' or 'update', got {reduction!r}"


@checks("relax.gather_nd")
def check_gather_nd(call: Call, active: Collection[Var]) -> str | None:
    """TVM has no batched scatter."""
    dims = int(call.attrs.batch_dims)
    return f"wanted batch_dims 0, got {dims}" if dims else None
