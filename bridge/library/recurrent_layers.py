"""Recurrent layers on a GPU: cuDNN's kernels of all layers and directions at once, and their VJP.

cuDNN takes the weights of all layers in one buffer, and hands its backward a workspace. Parameters of torch's layers
lie as in that buffer from the start (``flatten_parameters``); others are copied into one. Where there is no cuDNN (what
is compiled for a GPU is looked at on the host), torch's layers and autograd stand in for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bridge.base.cudnn_layers import settings_of_layers
from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__: list[str] = []

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

    @property
    def of_layer(self) -> int:
        """Weights of one layer in one direction."""
        return 4 if self.biases else 2

    def settings(self, size: int) -> list[object]:
        """See :func:`~bridge.base.cudnn_layers.settings_of_layers`."""
        return settings_of_layers(self.cell, size, self.layers, self.both_ways)

    def of_torch(self, x: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        given = states if self.cell == "lstm" else states[0]
        return _LAYERS[self.cell](x, given, weights, self.biases, self.layers, 0.0, True, self.both_ways, False)


@functools.lru_cache(maxsize=64)
def _read(options: str) -> _Layers:
    return _Layers(**json.loads(options))


@library_function("recurrent_layers", aten._cudnn_rnn)
def recurrent_layers(options, states, *tensors):
    """Outputs, last ``states`` states, cuDNN's workspace."""
    layers = _read(options)
    x, weights, first = layers.parts(tensors)
    if not x.is_cuda:
        with torch.no_grad():
            return (*layers.of_torch(x, weights, first), x.new_empty(0, dtype=torch.uint8))
    h, *c = first
    rest = layers.settings(h.shape[2])
    buffer = _in_a_row(layers, x, weights)
    y, last, cell, workspace, _ = aten._cudnn_rnn(x, weights, layers.of_layer, buffer, h, c[0] if c else None, *rest)
    return (y, last, *([cell] if c else []), workspace)


@library_function("recurrent_layers_backward", aten._cudnn_rnn_backward)
def recurrent_layers_backward(options, count, *given):
    """VJPs with respect to the first ``count`` tensors, from the forward's results and the gradients of its own."""
    layers = _read(options)
    tensors, given = given[:count], given[count:]
    x, weights, states = layers.parts(tensors)
    y, workspace = given[0], given[1 + len(states)]
    dy, *d_last = (grad.contiguous() for grad in given[2 + len(states) :])
    if not x.is_cuda:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights, *states)]
        with torch.enable_grad():
            made = layers.of_torch(leaves[0], leaves[1 : -len(states)], leaves[-len(states) :])
        return torch.autograd.grad(made, leaves, [dy, *d_last])
    (h, *c), (dh, *dc) = states, d_last
    c, dc = (c[0], dc[0]) if c else (None, None)
    rest = layers.settings(h.shape[2])
    workspace = workspace.clone()  # cuDNN writes into it, and there may be another backward
    buffer, wanted = _in_a_row(layers, x, weights), [True, True, c is not None, True]
    dx, dh, dc, d_weights = aten._cudnn_rnn_backward(
        x, weights, layers.of_layer, buffer, h, c, y, dy, dh, dc, *rest, workspace, wanted
    )
    return (dx, *d_weights, dh, *([] if c is None else [dc]))


def _in_a_row(layers: _Layers, x: Tensor, weights: list[Tensor]) -> Tensor:
    """cuDNN's buffer of these weights: the memory that they lie in, where that is one, else a copy."""
    shapes = tuple(tuple(weight.shape) for weight in weights)
    count, offsets = _places(layers, x.shape[2], shapes, x.dtype, x.device)
    first, size = weights[0], x.element_size()
    storage = first.untyped_storage()
    begin = first.data_ptr() - size * offsets[0]
    lie_so = begin >= storage.data_ptr() and begin + size * count <= storage.data_ptr() + storage.nbytes()
    for weight, offset in zip(weights, offsets, strict=True):
        lie_so = lie_so and weight.data_ptr() == begin + size * offset
    if lie_so:
        return first.detach().as_strided((count,), (1,), first.storage_offset() - offsets[0])
    buffer = x.new_zeros(count)
    for weight, offset in zip(weights, offsets, strict=True):
        buffer[offset : offset + weight.numel()].view_as(weight).copy_(weight)
    return buffer


@functools.lru_cache(maxsize=64)
def _places(
    layers: _Layers, inputs: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
) -> tuple[int, tuple[int, ...]]:
    """Elements of cuDNN's buffer, and where each weight begins in it; cuDNN tells of weights that it puts there."""
    weights = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    mode, size, *_ = layers.settings(shapes[1][1])
    options = [inputs, mode, size, 0, layers.layers, False, layers.both_ways]
    with torch.no_grad():
        buffer = aten._cudnn_rnn_flatten_weight(weights, layers.of_layer, *options)
    return buffer.numel(), tuple(weight.storage_offset() - buffer.storage_offset() for weight in weights)
