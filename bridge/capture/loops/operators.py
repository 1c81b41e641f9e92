"""Marks of a loop in a traced graph: operators that give one step its carries and parts, and take its results.

    loop_first(first, sources, loop, place, length, reverse)   a carry as the step sees it, with ``first``'s layout
    loop_part(whole, loop, place)                              the step's part of a tensor that has the steps in front
    loop_last(next, loop, place)                               the carry after the last step
    loop_steps(y, loop, place, length)                         the step's result for all steps, the steps in front

``loop`` numbers the loops of a graph. The nodes between a loop's marks are its body, in any order; the importer makes
it a scan. ``sources`` are the tensors, beside ``first``, that autograd reaches from a carry in later steps. The marks
have no kernels: a graph with them is traced, never run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from bridge.base.torch_recording import own_operator


def _like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, tensor.stride())


def _part(whole: torch.Tensor, *_: Any) -> torch.Tensor:
    return whole.new_empty_strided(whole.shape[1:], whole.stride()[1:])


def _all_steps(y: torch.Tensor, loop: int, place: int, length: int) -> torch.Tensor:
    return y.new_empty_strided((length, *y.shape), (y.numel(), *y.stride()))


FIRST = own_operator(
    "loop_first(Tensor first, Tensor[] sources, int loop, int place, SymInt length, bool reverse) -> Tensor",
    None,
    _like,
)
PART = own_operator("loop_part(Tensor whole, int loop, int place) -> Tensor", None, _part)
LAST = own_operator("loop_last(Tensor next, int loop, int place) -> Tensor", None, _like)
STEPS = own_operator("loop_steps(Tensor y, int loop, int place, SymInt length) -> Tensor", None, _all_steps)
MARKS = (FIRST, PART, LAST, STEPS)
for _mark in MARKS:
    torch.fx.node.has_side_effect(_mark)  # keeps a carry that is unused after the loop
