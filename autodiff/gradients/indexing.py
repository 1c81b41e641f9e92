"""Gradients of gathering and scattering: each is the other's gradient."""

from __future__ import annotations

from collections.abc import Collection

from tvm.relax import op

from autodiff.extents import same
from autodiff.gradients.registry import Emit, checks, const, gradient, zeros_like
from autodiff.ir import Call, Expr, Var, dtype, shape

__all__ = []


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
