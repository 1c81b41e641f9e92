"""Helpers of gradient rules: summing over broadcast dimensions, reduced axes, constants."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.relax import op

from autodiff.constants import const
from autodiff.extents import Dim, Extent, same, same_shape
from autodiff.gradients.registry import Emit
from autodiff.ir import Call, Expr, Tuple, dtype, shape
from autodiff.normalization import statistics_dtype

__all__ = ["axes_of", "const", "fit", "keep_axes", "padded", "sum_over", "zeros_like"]


def fit(partial: Expr, like: Expr, emit: Emit) -> Expr:
    """``partial`` summed over the dimensions along which ``like`` was broadcast."""
    partial = emit(partial)
    extents, wanted = shape(partial), shape(like)
    if same_shape(extents, wanted):
        return partial
    extra = len(extents) - len(wanted)
    stretched = [not same(extent, own) and own == 1 for extent, own in zip(extents[extra:], wanted, strict=True)]
    axes = [*range(extra), *(extra + axis for axis, summed in enumerate(stretched) if summed)]
    summed = sum_over(partial, axes, emit, keepdims=not extra)
    return summed if same_shape(shape(summed), wanted) else op.reshape(summed, wanted)


def sum_over(value: Expr, axes: Sequence[int], emit: Emit, keepdims: bool = False) -> Expr:
    """The sum over ``axes``, accumulated in float32 for half types (TVM accumulates in the element type)."""
    element_type = dtype(value)
    wide = statistics_dtype(element_type)
    if wide != element_type:
        value = emit(op.astype(value, wide))
    value = emit(op.sum(value, list(axes), keepdims=keepdims))
    return value if wide == element_type else emit(op.astype(value, element_type))


def axes_of(call: Call) -> list[int]:
    """The axes that a reduction reduces, non-negative and sorted; all of them if it names none."""
    rank = len(shape(call.args[0]))
    axes = call.attrs.axis
    return list(range(rank)) if axes is None else sorted(int(axis) % rank for axis in axes)


def keep_axes(value: Expr, call: Call, emit: Emit) -> Expr:
    """A reduction's result (or its gradient) with the reduced axes as size-1 dims, so that it broadcasts."""
    extents = [1 if axis in axes_of(call) else extent for axis, extent in enumerate(shape(call.args[0]))]
    return value if same_shape(shape(value), extents) else emit(op.reshape(value, extents))


def padded(value: Expr, axis: int, before: Dim, after: Dim, emit: Emit) -> Expr:
    """``value`` between zeros along an axis: ``relax.nn.pad``, or where a width is an extent, which that cannot take, a
    concatenation with zeros."""
    if not isinstance(before, Extent) and not isinstance(after, Extent):
        widths = [0] * (2 * len(shape(value)))
        widths[2 * axis : 2 * axis + 2] = before, after
        return op.nn.pad(value, widths)

    def zeros(width: Dim) -> list[Expr]:
        extents = list(shape(value))
        extents[axis] = width
        return [] if same(width, 0) else [emit(op.zeros(extents, dtype(value)))]

    return op.concat(Tuple([*zeros(before), value, *zeros(after)]), axis=axis)


def zeros_like(value: Expr) -> Expr:
    """Zeros of a tensor's shape and element type."""
    return op.zeros(shape(value), dtype(value))
