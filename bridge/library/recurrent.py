"""Recurrent layers: one direction of one layer over a whole sequence, and its VJP, as eager computes them.

An LSTM in float32 or bfloat16 is oneDNN's kernel, whose workspace is handed to its own backward; everything else, and
what that kernel does not know, goes step by step (:mod:`bridge.library.recurrent_cells`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bridge.base.torch_internals import aten
from bridge.library.recurrent_cells import CELLS, Weights, backward, forward
from bridge.library.registry import library_function

__all__ = ["FUSED_TYPES"]

FUSED_TYPES = (torch.float32, torch.bfloat16)
"""Element types of oneDNN's kernel."""

_LSTM = 2
"""oneDNN's number of the kind of cell."""


class _Layer(NamedTuple):
    """The options of a call, read: see ``recurrent_layer`` in :mod:`autodiff.library`."""

    cell: str
    reverse: bool
    biases: bool
    fused: bool

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Weights, list[Tensor]]:
        """The input, the weights and the states, in order among the tensors; a projection is the last weight."""
        x, of_input, of_hidden, *rest = (tensor.contiguous() for tensor in tensors)
        count = len(rest) - CELLS[self.cell].states
        weights, states = rest[:count], rest[count:]
        biases = [weights.pop(0), weights.pop(0)] if self.biases else [None, None]
        return x, Weights(of_input, of_hidden, *biases, *(weights or [None])), states

    def is_fused(self, x: Tensor) -> bool:
        """Whether oneDNN computes it: not where a check computes in float64 what was compiled in float32."""
        return self.fused and x.dtype in FUSED_TYPES

    def arguments(self, x: Tensor, weights: Weights) -> tuple[list[Tensor], int]:
        """Input and weights as oneDNN's operators take them, and the size of a state."""
        size = weights.of_hidden.shape[1]
        biases = weights[2:4] if self.biases else [x.new_zeros(4 * size)] * 2
        return [x, weights.of_input, weights.of_hidden, *biases], size


@functools.lru_cache(maxsize=64)
def _read(options: str) -> _Layer:
    return _Layer(**json.loads(options))


@library_function("recurrent_layer", aten.mkldnn_rnn_layer)
def recurrent_layer(options, states, *tensors):
    """Outputs, last ``states`` states, and what the backward reads."""
    layer = _read(options)
    x, weights, first = layer.parts(tensors)
    if not layer.is_fused(x):
        y, last, saved = forward(CELLS[layer.cell], layer.reverse, x, weights, first)
        return (y, *last, *saved)
    given, size = layer.arguments(x, weights)
    with torch.enable_grad():  # or it would make no workspace
        return aten.mkldnn_rnn_layer(
            *given, *first, layer.reverse, [], _LSTM, size, 1, layer.biases, False, False, True
        )


@library_function("recurrent_layer_backward", aten.mkldnn_rnn_layer_backward)
def recurrent_layer_backward(options, count, *given):
    """VJPs with respect to the first ``count`` tensors, from the forward's results and the gradients of its own."""
    layer = _read(options)
    tensors, given = given[:count], given[count:]
    x, weights, states = layer.parts(tensors)
    grads = [grad.contiguous() for grad in given[-1 - len(states) :]]
    y, *saved = given[: -len(grads)]
    last, saved = saved[: len(states)], saved[len(states) :]
    if layer.is_fused(x):
        arguments, size = layer.arguments(x, weights)
        options = [layer.reverse, _LSTM, size, 1, layer.biases, True, False, [], False]
        found = aten.mkldnn_rnn_layer_backward(*arguments, *states, y, *last, *grads, *options, *saved)
        dx, dw_x, dw_h, *biases, dh, dc = found
        made = [dx, dw_x, dw_h, *(biases if layer.biases else []), dh, dc]
    else:
        cell = CELLS[layer.cell]
        if layer.fused:
            y, _, saved = forward(cell, layer.reverse, x, weights, states)
        dx, d_weights, d_states = backward(cell, layer.reverse, x, weights, states, y, saved, grads[0], grads[1:])
        made = [dx, *(each for each in d_weights if each is not None), *d_states]
    return tuple(each.to(tensor.dtype) for each, tensor in zip(made, tensors, strict=True))
