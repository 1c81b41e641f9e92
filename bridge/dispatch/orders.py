"""Orders in memory: tensors of a call that lie as channels_last → what a forward and a backward are compiled for.

A program reads such a parameter where it lies; of any other layout than the sample's, it reads a dense copy. A gradient
is made to lie as what it is of, as eager's does: autograd copies what lies otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.capture import Captured
from bridge.dispatch.results import memory_orders
from bridge.lowering import LoweredCall

__all__ = ["backward_orders", "forward_orders"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def forward_orders(lowered: LoweredCall) -> dict[str, Any]:
    """Fields of :class:`bridge.compile.CompileOptions`."""
    captured = lowered.captured
    given = _orders(captured, range(len(captured.module_tensors) + len(captured.arguments)))
    return {"orders": memory_orders(captured, lowered.imported.output_of), "given_orders": given}


def backward_orders(lowered: LoweredCall, outputs: tuple[int, ...]) -> dict[str, Any]:
    """Likewise, of the backward for grad_outs of these outputs."""
    captured, gradients = lowered.captured, lowered.gradients_for(outputs)
    made = _orders(captured, [index for index in lowered.wanted if index in gradients])
    return {"orders": made, "given_orders": _orders(captured, lowered.plan.saved_primals)}


def _orders(captured: Captured, primals: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of a program's first parameters, or of a backward's results, which are gradients of these, where sizes are known.

    Args:
        primals: which of the call's they are: the module's tensors, the arguments, then others.
    """
    if captured.extents is not None:
        return ()
    tensors = [(each.shape, each.stride, each.dtype) for each in captured.module_tensors]
    tensors += [(each.shape, each.stride(), each.dtype) for each in captured.arguments]
    found = []
    for place, index in enumerate(primals):
        shape, stride, dtype = tensors[index] if index < len(tensors) else ((), (), torch.bool)
        if len(shape) in _CHANNELS_LAST and dtype.is_floating_point:
            form = torch.empty_strided(shape, stride, device="meta")
            if form.is_contiguous(memory_format=_CHANNELS_LAST[len(shape)]) and not form.is_contiguous():
                found.append((place, (0, *range(2, len(shape)), 1)))
    return tuple(found)
