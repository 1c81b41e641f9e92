"""Concatenation and padding → a neutral node; :mod:`bridge.compile.passes.choose_joins` says how."""

from __future__ import annotations

from collections.abc import Sequence

from autodiff.extents import Dim, Extent
from autodiff.ir import Call, Tuple, TupleType, dtype, shape
from bridge.compile.loop_ir.graph import Operand, Scalar, whole
from bridge.compile.loop_ir.neutral import Join
from bridge.compile.passes.choose_joins import is_worth_joining
from bridge.compile.translate.builder import Builder
from bridge.compile.translate.libcalls import emit, tensor
from bridge.compile.translate.registry import register

__all__: list[str] = []


@register("relax.concat")
def _concat(builder: Builder, call: Call) -> Operand:
    field = call.args[0]
    many = isinstance(field, Tuple) or isinstance(field.ty, TupleType)
    operands = builder.get(field) if many else [builder.get(field)]
    if len({operand.dtype for operand in operands}) > 1:
        return NotImplemented
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(shape(call))
    return _join(builder, operands, axis, shape(call))


@register("relax.nn.pad")
def _pad(builder: Builder, call: Call) -> Operand:
    """By a kernel that concatenates; where it had better not, and of several axes, one of torch's copies."""
    x = builder.get(call.args[0])
    widths = [int(width) for width in call.attrs.pad_width]
    axes = [axis for axis in range(len(x.shape)) if any(widths[2 * axis : 2 * axis + 2])]
    symbolic = any(isinstance(extent, Extent) for extent in x.shape)
    if str(call.attrs.pad_mode) != "constant" or min(widths) < 0 or not axes:
        return NotImplemented
    fill = float(call.attrs.pad_value)
    number = fill if "float" in x.dtype else int(fill)
    if not symbolic and len(axes) > 1:
        return _copied(builder, call, widths, number)
    for axis in axes:
        operands: list[Operand | Scalar] = [x]
        for width, place in ((widths[2 * axis], 0), (widths[2 * axis + 1], 2)):
            if width:
                extents = (*x.shape[:axis], width, *x.shape[axis + 1 :])
                operands.insert(place, Scalar(number, x.dtype, extents))
        if not symbolic and not is_worth_joining(operands, axis, builder.rules):
            return _copied(builder, call, widths, number)
        extent = sum(widths[2 * axis : 2 * axis + 2]) + x.shape[axis]
        x = _join(builder, operands, axis, (*x.shape[:axis], extent, *x.shape[axis + 1 :]))
    return x


def _copied(builder: Builder, call: Call, widths: Sequence[int], number: float) -> Operand:
    """Between numbers that are written around it."""
    out = builder.fresh(shape(call), dtype(call))
    return emit(builder, "pad", [tensor(builder, call.args[0])], [out], tuple(widths[::2]), number)[0]


def _join(builder: Builder, operands: Sequence[Operand | Scalar], axis: int, extents: Sequence[Dim]) -> Operand:
    out = builder.fresh(extents, operands[0].dtype)
    builder.add(Join(tuple(operands), axis, out))
    return whole(out)
