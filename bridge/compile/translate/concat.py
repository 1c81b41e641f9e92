"""Concatenation and padding → a node whose sections of the columns are computed in different ways; or torch's ``cat``.

A concatenation along ``axis`` walks ``(rows, sections, inner)``: the loop over the sections is unrolled, and each reads
its own operand. So the gradient of a chunked tensor (the gates of an LSTM, query, key and value) is put together where
it is summed up and normalized, and a rotary embedding is one kernel. What the operands are made of by cheap arithmetic
is computed again in its section: :mod:`bridge.compile.passes.sections`.

Where there is little to gain (few rows, short or many sections) torch concatenates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autodiff.ir import Call, Tuple, TupleType, dtype, shape
from bridge.compile.loop_ir.graph import Concat, LibraryCall, Operand, Scalar, whole
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.fuse import sections_of
from bridge.compile.schedule.space import make_space
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
    joined = _joined(builder, operands, axis, call)
    return _library(builder, operands, axis, call) if joined is None else joined


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
    joined = _joined(builder, operands, axis, call)
    return NotImplemented if joined is None else joined


def _joined(builder: Builder, operands: Sequence[Operand | Scalar], axis: int, call: Call) -> Operand | None:
    """The concatenation as a node of a kernel, or ``None`` where that is not worth while or not possible."""
    extents = shape(call)
    lengths = [operand.shape[axis] for operand in operands if operand.shape[axis]]
    if math.prod(extents) == 0 or all(isinstance(operand, Scalar) for operand in operands):
        return None
    step = math.gcd(*lengths)
    inner = step * math.prod(extents[axis + 1 :])
    sections = extents[axis] // step
    rows = math.prod(extents[:axis])
    rules, limits = builder.rules, builder.rules.limits
    if not 2 <= sections <= limits.joined_sections or inner < rules.order.lanes or rows < limits.joined_rows:
        return None
    places = [(operand, begin) for operand in operands for begin in range(0, operand.shape[axis], step)]
    spread = (*extents[:axis], sections, step, *extents[axis + 1 :])
    placed = tuple(_placed(operand, axis, begin, spread) for operand, begin in places)
    out = builder.fresh(extents, dtype(call))
    node = Concat("concat", placed, out, inner)
    accesses = [(operand.view, 1) for operand in placed if isinstance(operand, Operand)]
    if make_space(out.numel, sections * inner, [*accesses, (sections_of(node), 1)], rules, reduces=False) is None:
        return None
    builder.add(node)
    return whole(out)


def _placed(operand: Operand | Scalar, axis: int, begin: int, spread: tuple[int, ...]) -> Operand | Scalar:
    """``spread[axis + 1]`` elements from ``begin`` on along the axis, the same in each of ``spread[axis]`` sections."""
    if isinstance(operand, Scalar):
        return Scalar(operand.number, operand.dtype, spread)
    view = operand.view
    strides = (*view.strides[:axis], 0, *view.strides[axis:])
    return Operand(operand.value, View(spread, strides, view.offset + begin * view.strides[axis]))


def _library(builder: Builder, operands: Sequence[Operand | Scalar], axis: int, call: Call) -> Operand:
    tensors = [builder.dense(operand) if isinstance(operand, Scalar) else operand for operand in operands]
    out = builder.fresh(shape(call), dtype(call))
    builder.add(LibraryCall("cat", tuple(tensors), (out,), (axis,)))
    return whole(out)
