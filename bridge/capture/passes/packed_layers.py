"""Recurrent layers over packed sequences: ``tvm_dispatch::packed_layers``, on padded ones and their lengths.

    packed_layers(cell, x, lengths, states, weights, biases, layers, both_ways) -> (y, h, c)

``x``: [steps, batch, inputs], zeros behind the end of each sequence; ``lengths``: from the longest one down. A state
behind the end is that at the end, and ``y`` is zero there. ``c`` is empty for cells without one. Its kernel is torch's
operator on the packed rows. What autograd and the fake runs need of it is here; a compiled program has loops instead
(:mod:`bridge.aten.recurrent`).
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.torch_internals import aten

__all__ = ["PACKED_LAYERS", "packed_layers"]

_library = torch.library.Library("tvm_dispatch", "FRAGMENT")
_library.define(
    "packed_layers(str cell, Tensor x, Tensor lengths, Tensor[] states, Tensor[] weights, bool biases, int layers, "
    "bool both_ways) -> (Tensor, Tensor, Tensor)"
)


def packed_layers(
    cell: str,
    x: torch.Tensor,
    lengths: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    biases: bool,
    layers: int,
    both_ways: bool,
) -> tuple[torch.Tensor, ...]:
    """The operator by torch's own: autograd follows it, any number of times."""
    rows, sizes = aten._pack_padded_sequence(x, lengths.to(HOST), False)
    first = list(states) if cell == "lstm" else states[0]
    y, *last = getattr(aten, cell).data(rows, sizes, first, weights, biases, layers, 0.0, True, both_ways)
    y, _ = aten._pad_packed_sequence(y, sizes, False, 0.0, x.shape[0])
    return y, last[0], last[1] if cell == "lstm" else x.new_empty(0)


def _like(cell, x, lengths, states, weights, biases, layers, both_ways):
    directions = 2 if both_ways else 1
    y = x.new_empty(*x.shape[:2], directions * states[0].shape[2])
    return y, torch.empty_like(states[0]), torch.empty_like(states[1]) if cell == "lstm" else x.new_empty(0)


_library.impl("packed_layers", packed_layers, "CompositeExplicitAutograd")
_library.impl("packed_layers", _like, "Meta")


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    cell, x, lengths, states, weights, *ctx.options = inputs
    ctx.cell, ctx.states = cell, len(states)
    ctx.save_for_backward(x, lengths, *states, *weights)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple:
    x, lengths, *rest = ctx.saved_tensors
    with torch.enable_grad():
        x, *rest = [each.detach().requires_grad_() for each in (x, *rest)]
        states, weights = rest[: ctx.states], rest[ctx.states :]
        made = packed_layers(ctx.cell, x, lengths, states, weights, *ctx.options)
        pairs = [pair for pair in zip(made, grads, strict=True) if pair[0].requires_grad and pair[1] is not None]
        outputs, grads = zip(*pairs, strict=True)
        of_x, *found = torch.autograd.grad(outputs, [x, *rest], grads)
    return None, of_x, None, found[: ctx.states], found[ctx.states :], None, None, None


torch.library.register_autograd("tvm_dispatch::packed_layers", _backward, setup_context=_keep, lib=_library)
PACKED_LAYERS = torch.ops.tvm_dispatch.packed_layers.default
