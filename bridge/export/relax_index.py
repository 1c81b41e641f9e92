"""Indexing by tensors in Relax's own operators: ``x[indices]`` as one gather along a flat axis.

Eager raises for an index out of range; here the element is NaN, or, of integers, the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.relax import op

from autodiff.constants import const
from autodiff.extents import broadcast
from autodiff.ir import Expr, dtype, is_float, shape
from autodiff.rewrite import Scope

__all__ = ["gathered", "indexed"]


def gathered(x: Expr, places: Expr, axis: int) -> Expr:
    """The slices of ``x`` at places along an axis."""
    return op.take(x, places, axis=axis, mode="nan" if is_float(x) else "clip")


def indexed(x: Expr, dims: Sequence[int], indices: Sequence[Expr], scope: Scope) -> Expr:
    """``x`` at integer tensors, one for each of ``dims``; negative ones count from the end."""
    extents, rank = shape(x), len(shape(x))
    others = [axis for axis in range(rank) if axis not in dims]
    counts = [extents[axis] for axis in dims]
    order = [*dims, *others]
    if order != sorted(order):
        x = scope.emit(op.permute_dims(x, order), "moved")
    kept = [extents[axis] for axis in others]
    flat = scope.emit(op.reshape(x, [math.prod(counts), *kept]), "flat")
    at = broadcast([shape(index) for index in indices])
    place = scope.emit(op.reshape(_flat_place(counts, indices, scope), [-1]), "place")
    taken = scope.emit(op.reshape(scope.emit(gathered(flat, place, 0), "taken"), [*at, *kept]), "taken")
    first = dims[0] if list(dims) == [*range(dims[0], dims[0] + len(dims))] else 0
    moved = [*range(len(at), len(at) + first), *range(len(at)), *range(len(at) + first, len(at) + len(kept))]
    return op.permute_dims(taken, moved)


def _flat_place(counts: Sequence[int], indices: Sequence[Expr], scope: Scope) -> Expr:
    """Where each element lies along the flat axis; behind its end if one of its indices is out of range."""
    total: Expr = const(0, "int64")
    outside: Expr = const(0, "bool")
    for position, (count, index) in enumerate(zip(counts, indices, strict=True)):
        wide = scope.emit(op.astype(index, "int64"), "index") if dtype(index) != "int64" else index
        negative = scope.emit(op.less(wide, const(0, "int64")), "negative")
        wrapped = scope.emit(op.add(wide, const(count, "int64")), "wrapped")
        place = scope.emit(op.where(negative, wrapped, wide), "place")
        for wrong in (op.less(place, const(0, "int64")), op.greater_equal(place, const(count, "int64"))):
            outside = scope.emit(op.logical_or(outside, scope.emit(wrong, "wrong")), "outside")
        step = math.prod(counts[position + 1 :])
        total = scope.emit(op.add(total, scope.emit(op.multiply(place, const(step, "int64")), "step")), "total")
    return scope.emit(op.where(outside, const(math.prod(counts), "int64"), total), "total")
