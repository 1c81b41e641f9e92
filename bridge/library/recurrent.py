"""Recurrent layers: all layers by cuDNN or by torch's own function, or one layer by oneDNN, and their VJPs.

cuDNN and oneDNN hand their backward a workspace. cuDNN takes the weights of all layers in one buffer: parameters of
torch's layers form this buffer (``flatten_parameters``); others are copied into one. Elsewhere (sizes that vary, a
program for a GPU inspected on the host, a check in float64) torch's function computes the layers, and autograd their
VJP, from the layers computed again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from bridge.base.torch_cuda import settings_of_layers
from bridge.base.torch_internals import VF, aten
from bridge.library.registry import library_function

_LAYERS = {"rnn_relu": VF.rnn_relu, "rnn_tanh": VF.rnn_tanh, "lstm": VF.lstm, "gru": VF.gru}

_Options = TypeVar("_Options")


@functools.lru_cache(maxsize=64)
def _read(kind: type[_Options], options: str) -> _Options:
    return kind(**json.loads(options))


def _by_autograd(
    layers: Callable[[Sequence[Tensor]], tuple[Tensor, ...]], tensors: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The VJP of layers with respect to all their tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        made = layers(leaves)
    return torch.autograd.grad(made, leaves, grads)


class _Layers(NamedTuple):
    """The parsed options of a call: see ``recurrent_layers`` in :mod:`autodiff.library`."""

    cell: str
    layers: int
    both_ways: bool
    biases: bool
    cudnn: bool

    @property
    def states(self) -> int:
        """The number of states of a cell."""
        return 2 if self.cell == "lstm" else 1

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """The input, the weights and the states among the tensors."""
        return tensors[0], tensors[1 : -self.states], tensors[-self.states :]

    @property
    def of_layer(self) -> int:
        """The number of weights of one layer in one direction."""
        return 4 if self.biases else 2

    def settings(self, size: int) -> list[object]:
        return settings_of_layers(self.cell, size, self.layers, self.both_ways)

    def of_torch(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, weights, states = self.parts(tensors)
        given = states if self.cell == "lstm" else states[0]
        return _LAYERS[self.cell](x, given, weights, self.biases, self.layers, 0.0, True, self.both_ways, False)


@library_function("recurrent_layers", aten._cudnn_rnn)
def recurrent_layers(options, states, *tensors):
    """Outputs, last ``states`` states, cuDNN's workspace."""
    layers, tensors = _read(_Layers, options), [tensor.contiguous() for tensor in tensors]
    x, weights, (h, *c) = layers.parts(tensors)
    if not (layers.cudnn and x.is_cuda):
        with torch.no_grad():
            made = layers.of_torch(tensors)
        return (*made, x.new_empty(0, dtype=torch.uint8)) if layers.cudnn else made
    rest = layers.settings(h.shape[2])
    buffer = _in_a_row(layers, x, weights)
    y, last, cell, workspace, _ = aten._cudnn_rnn(x, weights, layers.of_layer, buffer, h, c[0] if c else None, *rest)
    return (y, last, *([cell] if c else []), workspace)


@library_function("recurrent_layers_backward", aten._cudnn_rnn_backward)
def recurrent_layers_backward(options, count, *given):
    """VJPs with respect to the first ``count`` tensors, from the forward's results and their gradients."""
    layers = _read(_Layers, options)
    tensors, given = [tensor.contiguous() for tensor in given[:count]], given[count:]
    x, weights, (h, *c) = layers.parts(tensors)
    dy, *d_last = (grad.contiguous() for grad in given[-1 - layers.states :])
    if not (layers.cudnn and x.is_cuda):
        return _by_autograd(layers.of_torch, tensors, [dy, *d_last])
    y, workspace = given[0], given[1 + layers.states]
    dh, *dc = d_last
    c, dc = (c[0], dc[0]) if c else (None, None)
    rest = layers.settings(h.shape[2])
    workspace = workspace.clone()  # cuDNN writes into it, and another backward may follow
    buffer, wanted = _in_a_row(layers, x, weights), [True, True, c is not None, True]
    dx, dh, dc, d_weights = aten._cudnn_rnn_backward(
        x, weights, layers.of_layer, buffer, h, c, y, dy, dh, dc, *rest, workspace, wanted
    )
    return (dx, *d_weights, dh, *([] if c is None else [dc]))


def _in_a_row(layers: _Layers, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """cuDNN's buffer of these weights: their own memory, if they lie in it as cuDNN requires, else a copy."""
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
    """The number of elements of cuDNN's buffer, and the offset of each weight in it, as cuDNN places them."""
    weights = [VF.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    mode, size, *_ = layers.settings(shapes[1][1])
    options = [inputs, mode, size, 0, layers.layers, False, layers.both_ways]
    with torch.no_grad():
        buffer = aten._cudnn_rnn_flatten_weight(weights, layers.of_layer, *options)
    return buffer.numel(), tuple(weight.storage_offset() - buffer.storage_offset() for weight in weights)


_FUSED_TYPES = (torch.float32, torch.bfloat16)
"""Element types of oneDNN's kernel; a check may run a program of these in float64."""

_LSTM = 2
"""oneDNN's number of the cell kind."""


class _Layer(NamedTuple):
    """The parsed options of a call: see ``recurrent_layer`` in :mod:`autodiff.library`."""

    reverse: bool
    biases: bool

    def of_torch(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, *weights, h, c = tensors
        x = x.flip(0) if self.reverse else x
        y, h, c = VF.lstm(x, [h[None], c[None]], weights, self.biases, 1, 0.0, True, False, False)
        return y.flip(0) if self.reverse else y, h[0], c[0]

    def operands(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """The arguments of oneDNN's operators up to the states, and the size of a state."""
        x, of_input, of_hidden, *biases, h, c = tensors
        size = of_hidden.shape[1]
        return [x, of_input, of_hidden, *(biases or [x.new_zeros(4 * size)] * 2), h, c], size


@library_function("recurrent_layer", aten.mkldnn_rnn_layer)
def recurrent_layer(options, states, *tensors):
    """Outputs, last ``states`` states, oneDNN's workspace."""
    layer, tensors = _read(_Layer, options), [tensor.contiguous() for tensor in tensors]
    if tensors[0].dtype not in _FUSED_TYPES:
        with torch.no_grad():
            return (*layer.of_torch(tensors), tensors[0].new_empty(0, dtype=torch.uint8))
    given, size = layer.operands(tensors)
    with torch.enable_grad():  # otherwise it makes no workspace
        return aten.mkldnn_rnn_layer(*given, layer.reverse, [], _LSTM, size, 1, layer.biases, False, False, True)


@library_function("recurrent_layer_backward", aten.mkldnn_rnn_layer_backward)
def recurrent_layer_backward(options, count, *given):
    """VJPs with respect to the first ``count`` tensors, from the forward's results and their gradients."""
    layer, tensors = _read(_Layer, options), [tensor.contiguous() for tensor in given[:count]]
    y, h, c, workspace, *grads = given[count:]
    grads = [grad.contiguous() for grad in grads]
    if tensors[0].dtype not in _FUSED_TYPES:
        return _by_autograd(layer.of_torch, tensors, grads)
    operands, size = layer.operands(tensors)
    rest = [layer.reverse, _LSTM, size, 1, layer.biases, True, False, [], False]
    dx, dw_x, dw_h, *biases, dh, dc = aten.mkldnn_rnn_layer_backward(*operands, y, h, c, *grads, *rest, workspace)
    made = [dx, dw_x, dw_h, *(biases if layer.biases else []), dh, dc]
    return tuple(each.to(tensor.dtype) for each, tensor in zip(made, tensors, strict=True))
