"""Concatenations: a neutral node → a node of a kernel whose sections read their own operands, or torch's ``cat``.

A concatenation along an axis walks ``(rows, sections, inner)``: the loop over the sections is unrolled, and each reads
its own operand. So the gradient of a chunked tensor (the gates of an LSTM, query, key and value) is put together where
it is summed up and normalized, and a rotary embedding is one kernel. What the operands are made of by cheap arithmetic
is computed again in its section: :mod:`bridge.compile.passes.sections`.

Where there is little to gain (few rows, short or many sections) torch concatenates. Both move the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autodiff.extents import Dim, Extent, sample_of
from bridge.compile.loop_ir.graph import Concat, LibraryCall, Operand, Scalar
from bridge.compile.loop_ir.neutral import Join
from bridge.compile.loop_ir.views import View
from bridge.compile.passes.placed import Placed
from bridge.compile.schedule.fuse import sections_of
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.space import make_space

__all__ = ["is_worth_joining", "join"]


def join(placed: Placed, node: Join, rules: Rules) -> Concat | LibraryCall:
    """The node that concatenates; its operands are placed."""
    joined = _in_a_kernel(node, rules) if is_worth_joining(node.operands, node.axis, rules) else None
    if joined is not None:
        return joined
    tensors = [placed.dense(operand) if isinstance(operand, Scalar) else operand for operand in node.operands]
    return LibraryCall("cat", tuple(tensors), (node.out,), (node.axis,))


def is_worth_joining(operands: Sequence[Operand | Scalar], axis: int, rules: Rules) -> bool:
    """Whether a kernel had better concatenate, if the views of the operands let it."""
    extents = operands[0].shape
    if all(isinstance(operand, Scalar) for operand in operands):
        return False
    lengths = [operand.shape[axis] for operand in operands]
    if any(isinstance(extent, Extent) for extent in (*lengths, *extents[axis + 1 :])):
        return False  # the sections are unrolled
    step = math.gcd(*lengths)
    rows, inner = sample_of(math.prod(extents[:axis])), step * math.prod(extents[axis + 1 :])
    if rows * inner == 0:
        return False
    limits = rules.limits
    is_joined = 2 <= sum(lengths) // step <= limits.joined_sections
    return is_joined and inner >= rules.order.lanes and rows >= limits.joined_rows


def _in_a_kernel(node: Join, rules: Rules) -> Concat | None:
    """``None`` where no loops walk all operands."""
    extents, axis = node.out.shape, node.axis
    step = math.gcd(*(operand.shape[axis] for operand in node.operands))
    inner = step * math.prod(extents[axis + 1 :])
    sections = extents[axis] // step
    places = [(operand, begin) for operand in node.operands for begin in range(0, operand.shape[axis], step)]
    spread = (*extents[:axis], sections, step, *extents[axis + 1 :])
    sections_read = tuple(_in_sections(operand, axis, begin, spread) for operand, begin in places)
    concat = Concat("concat", sections_read, node.out, inner)
    accesses = [(operand.view, 1) for operand in sections_read if isinstance(operand, Operand)]
    space = make_space(node.out.numel, sections * inner, [*accesses, (sections_of(concat), 1)], rules, reduces=False)
    return None if space is None else concat


def _in_sections(operand: Operand | Scalar, axis: int, begin: int, spread: tuple[Dim, ...]) -> Operand | Scalar:
    """``spread[axis + 1]`` elements from ``begin`` on along the axis, the same in each of ``spread[axis]`` sections."""
    if isinstance(operand, Scalar):
        return Scalar(operand.number, operand.dtype, spread)
    view = operand.view
    strides = (*view.strides[:axis], 0, *view.strides[axis:])
    return Operand(operand.value, View(spread, strides, view.offset + begin * view.strides[axis]))
