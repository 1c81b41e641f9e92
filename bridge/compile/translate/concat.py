"""Concatenation and padding → a neutral node; :mod:`bridge.compile.passes.choose_joins` says how."""

from __future__ import annotations

from collections.abc import Sequence

from autodiff.ir import Call, Tuple, TupleType, dtype, shape
from bridge.compile.loop_ir.graph import Operand, Scalar, whole
from bridge.compile.loop_ir.neutral import Join
from bridge.compile.passes.choose_joins import is_worth_joining
from bridge.compile.translate.builder import Builder
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
    return _join(builder, operands, axis, call)


@register("relax.nn.pad")
def _pad(builder: Builder, call: Call) -> Operand:
    x = builder.get(call.args[0])
    widths = [int(width) for width in call.attrs.pad_width]
    axes = [axis for axis in range(len(x.shape)) if any(widths[2 * axis : 2 * axis + 2])]
    if str(call.attrs.pad_mode) != "constant" or len(axes) != 1 or min(widths) < 0:
        return NotImplemented
    (axis,) = axes
    fill = float(call.attrs.pad_value)
    number = fill if "float" in x.dtype else int(fill)
    operands: list[Operand | Scalar] = [x]
    for width, place in ((widths[2 * axis], 0), (widths[2 * axis + 1], 2)):
        if width:
            extents = (*x.shape[:axis], width, *x.shape[axis + 1 :])
            operands.insert(place, Scalar(number, x.dtype, extents))
    return _join(builder, operands, axis, call) if is_worth_joining(operands, axis, builder.rules) else NotImplemented


def _join(builder: Builder, operands: Sequence[Operand | Scalar], axis: int, call: Call) -> Operand:
    out = builder.fresh(shape(call), dtype(call))
    builder.add(Join(tuple(operands), axis, out))
    return whole(out)
