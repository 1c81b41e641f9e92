"""Recurrent layers: one direction of one layer over a whole sequence, or all layers by cuDNN, and their VJPs.

One layer: an LSTM in float32 or bfloat16 is oneDNN's kernel, whose workspace goes to its own backward. All other cells
and types run step by step (eager: a loop of small operators). There the input's part of all gates is one product, each
step is one product and a few in-place operators, and the backward multiplies by derivatives that are computed for all
steps at once; each weight gradient is one product. The arithmetic is eager's up to the order of sums.

A cell's functions take ``x`` [steps, batch, inputs], :class:`Weights` and states [batch, hidden]:

    forward(x, weights, states, order) -> y, last states, saved tensors
    backward(y, weights, states, saved, dy, d_states, order) -> d_gates_x, d_gates_h, d_states, [d_projection]

All layers and directions on a GPU: cuDNN's kernels and their VJP. cuDNN takes the weights of all layers in one buffer,
and hands its backward a workspace. Parameters of torch's layers form this buffer (``flatten_parameters``); others are
copied into one. Without cuDNN (a program for a GPU inspected on the host), torch's layers and autograd replace it.
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

__all__ = ["CELLS", "FUSED_TYPES", "RecurrentCell", "Weights", "backward", "forward"]


class Weights(NamedTuple):
    """Weights of one layer in one direction; gates in torch's order, absent biases and projection ``None``."""

    of_input: Tensor
    of_hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None


class RecurrentCell(NamedTuple):
    """Forward and backward of a kind of cell; ``states``: the number of its states."""

    forward: Callable[..., tuple[Tensor, list[Tensor], list[Tensor]]]
    backward: Callable[..., tuple[Tensor, Tensor, list[Tensor], list[Tensor]]]
    states: int


def _of_input(x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
    return aten.linear(x, weights.of_input, bias)


def _before(y: Tensor, first: Tensor, order: Sequence[int]) -> Tensor:
    """The state before each step, from the states after each step."""
    return VF.cat([y[1:], first[None]] if order[0] else [first[None], y[:-1]])


def _lstm(x: Tensor, weights: Weights, states: list[Tensor], order: Sequence[int]):
    """c' = f c + i g, h' = o tanh(c'); i, f, o = sigmoid, g = tanh of x Wx + h Wh + b."""
    size = states[1].shape[1]
    bias = None if weights.input_bias is None else weights.input_bias + weights.hidden_bias
    gates = _of_input(x, weights, bias)
    cells, y = x.new_empty(*x.shape[:2], size), x.new_empty(*x.shape[:2], states[0].shape[1])
    parts = gates.split(size, 2)
    each, (i, f, g, o) = gates.unbind(0), (part.unbind(0) for part in parts)
    i_and_f, every_c, every_h = gates[..., : 2 * size].unbind(0), cells.unbind(0), y.unbind(0)
    h, c = states
    recurrent = weights.of_hidden.t()
    for t in order:
        each[t].addmm_(h, recurrent)
        i_and_f[t].sigmoid_()
        g[t].tanh_()
        o[t].sigmoid_()
        c = VF.mul(f[t], c, out=every_c[t]).addcmul_(i[t], g[t])
        if weights.projection is None:
            h = VF.mul(o[t], c.tanh(), out=every_h[t])
        else:
            h = VF.mm(o[t] * c.tanh(), weights.projection.t(), out=every_h[t])
    return y, [h, c], [gates, cells]


def _lstm_backward(y, weights, states, saved, dy, d_states, order):
    gates, cells = saved
    size = cells.shape[2]
    i, f, g, o = gates.split(size, 2)
    tanh = cells.tanh()
    to_c = o * (1 - tanh * tanh)
    before = _before(cells, states[1], order)
    to_o = tanh * o * (1 - o)
    to_ifg = VF.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], 2)
    d_gates = VF.empty_like(gates)
    split = d_gates.view(*d_gates.shape[:2], 4, size)
    d_ifg, d_o, flat = split[:, :, :3].unbind(0), split[:, :, 3].unbind(0), d_gates.unbind(0)
    projected = None if weights.projection is None else VF.empty_like(dy)
    dh, dc = d_states
    to_c, to_o, to_ifg, f, dy = (each.unbind(0) for each in (to_c, to_o, to_ifg, f, dy))
    for t in reversed(order):
        dh = dh + dy[t]
        if projected is not None:
            projected[t] = dh
            dh = dh @ weights.projection
        VF.mul(to_o[t], dh, out=d_o[t])
        dc = VF.addcmul(dc, to_c[t], dh)
        VF.mul(to_ifg[t], dc.unsqueeze(1), out=d_ifg[t])
        dc = dc * f[t]
        dh = flat[t] @ weights.of_hidden
    d_projection = [] if projected is None else [projected.flatten(0, 1).t() @ (o * tanh).flatten(0, 1)]
    return d_gates, d_gates, [dh, dc], d_projection


def _gru(x: Tensor, weights: Weights, states: list[Tensor], order: Sequence[int]):
    """h' = n + z (h - n); r, z = sigmoid, n = tanh of x Wx + b + r (h Wh + b), where r acts on n's part alone."""
    (h,) = states
    size = h.shape[1]
    gates = _of_input(x, weights, weights.input_bias)
    hidden, y = x.new_empty(*x.shape[:2], 3 * size), x.new_empty(*x.shape[:2], size)
    r, z, n = (part.unbind(0) for part in gates.split(size, 2))
    r_and_z, hidden_r_and_z = gates[..., : 2 * size].unbind(0), hidden[..., : 2 * size].unbind(0)
    hidden_n, every_h, every = hidden[..., 2 * size :].unbind(0), y.unbind(0), hidden.unbind(0)
    recurrent = weights.of_hidden.t()
    for t in order:
        if weights.hidden_bias is None:
            VF.mm(h, recurrent, out=every[t])
        else:
            VF.addmm(weights.hidden_bias, h, recurrent, out=every[t])
        r_and_z[t].add_(hidden_r_and_z[t]).sigmoid_()
        n[t].addcmul_(r[t], hidden_n[t]).tanh_()
        h = VF.sub(h, n[t], out=every_h[t]).mul_(z[t]).add_(n[t])
    return y, [h], [gates, hidden[..., 2 * size :].contiguous()]


def _gru_backward(y, weights, states, saved, dy, d_states, order):
    gates, hidden_n = saved
    size = y.shape[2]
    r, z, n = gates.split(size, 2)
    to_n = (1 - z) * (1 - n * n)
    to_z = (_before(y, states[0], order) - n) * z * (1 - z)
    factors = VF.stack([to_n * hidden_n * r * (1 - r), to_z, to_n * r, to_n], 2).unbind(0)
    split = y.new_empty(*y.shape[:2], 4, size)  # r, z, the hidden part of n, the input's part of n
    d_gates_h = split.view(*y.shape[:2], 4 * size)[..., : 3 * size]
    every, flat = split.unbind(0), d_gates_h.unbind(0)
    (dh,) = d_states
    z, dy = z.unbind(0), dy.unbind(0)
    for t in reversed(order):
        dh = dh + dy[t]
        VF.mul(factors[t], dh.unsqueeze(1), out=every[t])
        dh = VF.addmm(dh * z[t], flat[t], weights.of_hidden)
    d_gates_x = VF.cat([split[:, :, :2], split[:, :, 3:]], 2).flatten(2)
    return d_gates_x, d_gates_h, [dh], []


def _plain(activate: Callable[[Tensor], Tensor]):
    """h' = tanh or relu of x Wx + h Wh + b."""

    def step_by_step(x: Tensor, weights: Weights, states: list[Tensor], order: Sequence[int]):
        bias = None if weights.input_bias is None else weights.input_bias + weights.hidden_bias
        y = _of_input(x, weights, bias)
        (h,), every, recurrent = states, y.unbind(0), weights.of_hidden.t()
        for t in order:
            h = activate(every[t].addmm_(h, recurrent))
        return y, [h], []

    return step_by_step


def _plain_backward(derivative: Callable[[Tensor], Tensor]):
    def backwards(y, weights, states, saved, dy, d_states, order):
        d_gates = derivative(y)
        every, dy = d_gates.unbind(0), dy.unbind(0)
        (dh,) = d_states
        for t in reversed(order):
            dh = every[t].mul_(dh + dy[t]) @ weights.of_hidden
        return d_gates, d_gates, [dh], []

    return backwards


CELLS = {
    "lstm": RecurrentCell(_lstm, _lstm_backward, 2),
    "gru": RecurrentCell(_gru, _gru_backward, 1),
    "rnn_tanh": RecurrentCell(_plain(VF.tanh_), _plain_backward(lambda y: 1 - y * y), 1),
    "rnn_relu": RecurrentCell(_plain(VF.relu_), _plain_backward(lambda y: (y <= 0).logical_not().to(y.dtype)), 1),
}
"""By the names of torch's operators for whole layers."""


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def forward(
    cell: RecurrentCell, reverse: bool, x: Tensor, weights: Weights, states: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Outputs [steps, batch, hidden] in the order of the input, last states, and saved tensors for :func:`backward`."""
    y, last, saved = cell.forward(x, weights, states, _order(len(x), reverse))
    return y, [state.clone() for state in last], saved


def backward(
    cell: RecurrentCell,
    reverse: bool,
    x: Tensor,
    weights: Weights,
    states: list[Tensor],
    y: Tensor,
    saved: list[Tensor],
    dy: Tensor,
    d_states: list[Tensor],
) -> tuple[Tensor, Weights, list[Tensor]]:
    """VJPs with respect to the input, the weights and the initial states (backpropagation through time)."""
    order = _order(len(x), reverse)
    of_x, of_h, d_first, d_projection = cell.backward(y, weights, states, saved, dy, d_states, order)
    flat_x, flat_h = of_x.flatten(0, 1), of_h.flatten(0, 1)
    d_weights = Weights(
        flat_x.t() @ x.flatten(0, 1),
        flat_h.t() @ _before(y, states[0], order).flatten(0, 1),
        None if weights.input_bias is None else flat_x.sum(0),
        None if weights.hidden_bias is None else flat_h.sum(0),
        d_projection[0] if d_projection else None,
    )
    return (flat_x @ weights.of_input).view_as(x), d_weights, d_first


_LAYERS = {"rnn_relu": VF.rnn_relu, "rnn_tanh": VF.rnn_tanh, "lstm": VF.lstm, "gru": VF.gru}

_Options = TypeVar("_Options")


@functools.lru_cache(maxsize=64)
def _read(kind: type[_Options], options: str) -> _Options:
    return kind(**json.loads(options))


class _Layers(NamedTuple):
    """The parsed options of a call: see ``recurrent_layers`` in :mod:`autodiff.library`."""

    cell: str
    layers: int
    both_ways: bool
    biases: bool

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The input, the weights and the states among the tensors."""
        x, *rest = (tensor.contiguous() for tensor in tensors)
        count = len(rest) - (2 if self.cell == "lstm" else 1)
        return x, rest[:count], rest[count:]

    @property
    def of_layer(self) -> int:
        """The number of weights of one layer in one direction."""
        return 4 if self.biases else 2

    def settings(self, size: int) -> list[object]:
        return settings_of_layers(self.cell, size, self.layers, self.both_ways)

    def of_torch(self, x: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        given = states if self.cell == "lstm" else states[0]
        return _LAYERS[self.cell](x, given, weights, self.biases, self.layers, 0.0, True, self.both_ways, False)


@library_function("recurrent_layers", aten._cudnn_rnn)
def recurrent_layers(options, states, *tensors):
    """Outputs, last ``states`` states, cuDNN's workspace."""
    layers = _read(_Layers, options)
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
    """VJPs with respect to the first ``count`` tensors, from the forward's results and their gradients."""
    layers = _read(_Layers, options)
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
    workspace = workspace.clone()  # cuDNN writes into it, and another backward may follow
    buffer, wanted = _in_a_row(layers, x, weights), [True, True, c is not None, True]
    dx, dh, dc, d_weights = aten._cudnn_rnn_backward(
        x, weights, layers.of_layer, buffer, h, c, y, dy, dh, dc, *rest, workspace, wanted
    )
    return (dx, *d_weights, dh, *([] if c is None else [dc]))


def _in_a_row(layers: _Layers, x: Tensor, weights: list[Tensor]) -> Tensor:
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


FUSED_TYPES = (torch.float32, torch.bfloat16)
"""Element types of oneDNN's kernel."""

_LSTM = 2
"""oneDNN's number of the cell kind."""


class _Layer(NamedTuple):
    """The parsed options of a call: see ``recurrent_layer`` in :mod:`autodiff.library`."""

    cell: str
    reverse: bool
    biases: bool
    fused: bool

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Weights, list[Tensor]]:
        """The input, the weights and the states among the tensors; a projection is the last weight."""
        x, of_input, of_hidden, *rest = (tensor.contiguous() for tensor in tensors)
        count = len(rest) - CELLS[self.cell].states
        weights, states = rest[:count], rest[count:]
        biases = [weights.pop(0), weights.pop(0)] if self.biases else [None, None]
        return x, Weights(of_input, of_hidden, *biases, *(weights or [None])), states

    def is_fused(self, x: Tensor) -> bool:
        """Whether oneDNN computes it; not where a check runs a float32 program in float64."""
        return self.fused and x.dtype in FUSED_TYPES

    def arguments(self, x: Tensor, weights: Weights) -> tuple[list[Tensor], int]:
        """Input and weights as arguments of oneDNN's operators, and the size of a state."""
        size = weights.of_hidden.shape[1]
        biases = weights[2:4] if self.biases else [x.new_zeros(4 * size)] * 2
        return [x, weights.of_input, weights.of_hidden, *biases], size


@library_function("recurrent_layer", aten.mkldnn_rnn_layer)
def recurrent_layer(options, states, *tensors):
    """Outputs, last ``states`` states, and the saved tensors of the backward."""
    layer = _read(_Layer, options)
    x, weights, first = layer.parts(tensors)
    if not layer.is_fused(x):
        y, last, saved = forward(CELLS[layer.cell], layer.reverse, x, weights, first)
        return (y, *last, *saved)
    given, size = layer.arguments(x, weights)
    with torch.enable_grad():  # otherwise it makes no workspace
        return aten.mkldnn_rnn_layer(
            *given, *first, layer.reverse, [], _LSTM, size, 1, layer.biases, False, False, True
        )


@library_function("recurrent_layer_backward", aten.mkldnn_rnn_layer_backward)
def recurrent_layer_backward(options, count, *given):
    """VJPs with respect to the first ``count`` tensors, from the forward's results and their gradients."""
    layer = _read(_Layer, options)
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
