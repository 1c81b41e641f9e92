"""Masks of dropout in loops: what eager draws, call by call → one draw of all steps for each loop.

The first step's masks come first, as eager draws them: a row of the draw holds the masks of one step, one behind the
other. A step multiplies by them as eager's dropout does on the host. On a GPU eager's fused dropouts are told one by
one: where each tensor lies decides which element gets which number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from bridge.base.torch_internals import is_dense
from bridge.capture.loops.find import Loop
from bridge.capture.loops.row_calls import Calls, NotRolledError
from bridge.capture.observation import Draw, StepMasks

__all__ = ["FUSED", "draw_of_steps", "dropping"]

_MASK = "aten.bernoulli_.float"
FUSED = "aten.native_dropout.default"


def dropping(loop: Loop, calls: Calls) -> list[int]:
    """The rows of a step that draw a mask."""
    return [index for index in range(loop.period) if loop.start + index in calls.drawn]


def draw_of_steps(loop: Loop, calls: Calls) -> Draw | None:
    """What all steps of a loop draw; ``None`` if that is nothing. ``NotRolledError`` if it is not one draw."""
    drawn = [calls.drawn[loop.start + index] for index in dropping(loop, calls)]
    if not drawn:
        return None
    first = drawn[0]
    if first.op == FUSED:
        return _fused_steps(loop, calls, drawn)
    if any(each.op != _MASK or not is_dense(_like(each)) for each in drawn):
        raise NotRolledError("a draw in a loop that is no mask")
    if any((each.args, each.kwargs, each.dtype) != (first.args, first.kwargs, first.dtype) for each in drawn):
        raise NotRolledError("dropout of several rates or types in a step")
    counts = tuple(math.prod(each.shape) for each in drawn)
    shape = loop.steps, sum(counts)
    return replace(first, shape=shape, stride=(shape[1], 1), dtype=torch.bool, steps=StepMasks(counts, first.dtype))


def _fused_steps(loop: Loop, calls: Calls, drawn: Sequence[Draw]) -> Draw:
    """Likewise, of a GPU's dropouts; ``drawn``: those of the first step."""
    first = drawn[0]
    if len({(each.op, each.args, each.operand and each.operand.dtype, each.device) for each in drawn}) > 1:
        raise NotRolledError("dropout of several rates or types in a step")
    if first.operand.dtype not in (torch.float32, torch.float64):
        raise NotRolledError("dropout of a half type in a step, which eager rounds once")
    places = dropping(loop, calls)
    rows = [start + place for start in range(loop.start, loop.stop, loop.period) for place in places]
    counts = tuple(math.prod(each.shape) for each in drawn)
    shape, masks = (loop.steps, sum(counts)), tuple(calls.drawn[row] for row in rows)
    steps = StepMasks(counts, first.operand.dtype, masks)
    return Draw(_MASK, shape, (shape[1], 1), torch.bool, (1 - first.args[0],), device=first.device, steps=steps)


def _like(draw: Draw) -> torch.Tensor:
    return torch.empty_strided(draw.shape, draw.stride, device="meta")
