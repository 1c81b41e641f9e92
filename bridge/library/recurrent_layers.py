"""Recurrent layers on a GPU: cuDNN's kernels of all layers and directions at once, and their VJP.

cuDNN takes the weights of all layers in one buffer, which the forward makes, and hands its backward a workspace. Where
there is no cuDNN (what is compiled for a GPU is looked at on the host), torch's layers and autograd stand in for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__ = []

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of the kinds of cells."""

_LAYERS = {"rnn_relu": torch.rnn_relu, "rnn_tanh": torch.rnn_tanh, "lstm": torch.lstm, "gru": torch.gru}


class _Layers(NamedTuple):
    """The options of a call, read: see ``recurrent_layers`` in :mod:`autodiff.library`."""

    cell: str
    layers: int
    both_ways: bool
    biases: bool

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The input, the weights and the states, in order among the tensors."""
        x, *rest = (tensor.contiguous() for tensor in tensors)
        count = len(rest) - (2 if self.cell == "lstm" else 1)
        return x, rest[:count], rest[count:]

    def settings(self, size: int) -> list[object]:
        """What both of cuDNN's operators are told, from the kind of cell on: training, without dropout."""
        return [_MODES[self.cell], size, 0, self.layers, False, 0.0, True, self.both_ways, [], None]

    def of_torch(self, x: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        given = states if self.cell == "lstm" else states[0]
        return _LAYERS[self.cell](x, given, weights, self.biases, self.layers, 0.0, True, self.both_ways, False)


@functools.lru_cache(maxsize=64)
def _read(options: str) -> _Layers:
    return _Layers(**json.loads(options))


@library_function("recurrent_layers", aten._cudnn_rnn)
def recurrent_layers(options, states, *tensors):
    """Outputs, last ``states`` states, cuDNN's workspace and its weights."""
    layers = _read(options)
    x, weights, first = layers.parts(tensors)
    if not x.is_cuda:
        with torch.no_grad():
            return (*layers.of_torch(x, weights, first), x.new_empty(0, dtype=torch.uint8), x.new_empty(0))
    each, (h, *c) = 4 if layers.biases else 2, first
    settings = layers.settings(h.shape[2])
    y, last, cell, workspace, buffer = aten._cudnn_rnn(x, weights, each, None, h, c[0] if c else None, *settings)
    return (y, last, *([cell] if c else []), workspace, buffer)


@library_function("recurrent_layers_backward", aten._cudnn_rnn_backward)
def recurrent_layers_backward(options, count, *given):
    """VJPs with respect to the first ``count`` tensors, from the forward's results and the gradients of its own."""
    layers = _read(options)
    tensors, given = given[:count], given[count:]
    x, weights, states = layers.parts(tensors)
    y, workspace, buffer = (given[index] for index in (0, 1 + len(states), 2 + len(states)))
    dy, *d_last = (grad.contiguous() for grad in given[len(states) + 3 :])
    if not x.is_cuda:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights, *states)]
        with torch.enable_grad():
            made = layers.of_torch(leaves[0], leaves[1 : -len(states)], leaves[-len(states) :])
        return torch.autograd.grad(made, leaves, [dy, *d_last])
    each, (h, *c), (dh, *dc) = 4 if layers.biases else 2, states, d_last
    c, dc = (c[0], dc[0]) if c else (None, None)
    settings = layers.settings(h.shape[2])
    workspace = workspace.clone()  # cuDNN writes into it, and there may be another backward
    wanted = [True, True, c is not None, True]
    dx, dh, dc, d_weights = aten._cudnn_rnn_backward(
        x, weights, each, buffer, h, c, y, dy, dh, dc, *settings, workspace, wanted
    )
    return (dx, *d_weights, dh, *([] if c is None else [dc]))
