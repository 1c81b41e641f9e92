"""Recurrent layers before decomposition → ``tvm_dispatch::recurrent_layers``, which decomposition leaves whole.

It would unroll ``aten.lstm`` and its like over the steps, and lose the dropout between the layers. So a call of several
layers with dropout becomes calls of one layer each, with the dropout spelled out, and each of them an operator of ours
that draws nothing. In half types on the host a call becomes what it does in eager: an LSTM in bfloat16 oneDNN's
kernel, the others plain operators for each step, which round as eager's do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from bridge.base.devices import HOST, current_device
from bridge.base.torch_internals import FakeTensor, aten, schema
from bridge.capture.passes.alias_analysis import told
from bridge.capture.passes.autocast import expand

__all__ = ["LAYERED", "RECURRENT_LAYERS", "keep_layers_whole"]

_library = torch.library.Library("tvm_dispatch", "FRAGMENT")
_library.define(
    "recurrent_layers(str cell, Tensor x, Tensor[] states, Tensor[] weights, bool biases, int layers, bool both_ways, "
    "bool batch_first) -> Tensor[]"
)


def _like_results(cell, x, states, weights, biases, layers, both_ways, batch_first):
    size = states[0].shape[2] * (2 if both_ways else 1)
    steps = x.transpose(0, 1) if batch_first else x
    y = x.new_empty(*steps.shape[:2], size)
    return [y.transpose(0, 1) if batch_first else y, *(torch.empty_like(state) for state in states)]


_library.impl("recurrent_layers", _like_results, "Meta")
RECURRENT_LAYERS = torch.ops.tvm_dispatch.recurrent_layers.default
"""Whole layers without dropout; ``cell``: the name of torch's operator. Results: the output, then the last states."""


LAYERED = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
"""What ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call."""


def keep_layers_whole(graph: fx.Graph) -> None:
    """Rewrites the recurrent calls of a training-IR graph, in place."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in LAYERED or len(node.args) != 9:
            continue
        *_, layers, rate, train, _, _ = node.args
        is_half = bool(_half_values(node)) and current_device() == HOST
        for part in _split(graph, node, is_half) if layers > 1 and rate and train else [node]:
            if not is_half:
                _keep_whole(graph, part)
            else:
                expand(part, _half_values(part), None)


def _keep_whole(graph: fx.Graph, node: fx.Node) -> None:
    x, states, weights, biases, layers, _, _, both_ways, batch_first = node.args
    states = states if isinstance(states, list | tuple) else [states]
    cell = schema(node.target).name.removeprefix("aten::")
    arguments = (cell, x, list(states), list(weights), bool(biases), layers, bool(both_ways), bool(batch_first))
    with graph.inserting_before(node):
        made = graph.call_function(RECURRENT_LAYERS, arguments)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _half_values(node: fx.Node) -> dict[fx.Node, FakeTensor]:
    """Stand-ins for the tensors that a call reads; none if one of them is in float32 or float64."""
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    if not all(isinstance(value, FakeTensor) and value.element_size() < 4 for value in values.values()):
        return {}
    return {source: _of_numbers(value) for source, value in values.items()}


def _of_numbers(value: FakeTensor) -> FakeTensor:
    """A stand-in of the same layout, whose sizes are numbers: a recorded call of such layers has fixed them."""
    if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return torch.empty_like(value, requires_grad=False)
    with value.fake_mode:
        shape, stride = (list(map(int, each)) for each in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def _split(graph: fx.Graph, node: fx.Node, with_values: bool) -> list[fx.Node]:
    """Replaces a call of several layers by one for each, which it returns, with dropout between them.

    Args:
        with_values: whether the new nodes are to have fake tensors; unrolling the layers for them takes a while.
    """
    x, given, weights, has_biases, layers, rate, _, both_ways, batch_first = node.args
    states = given if isinstance(given, list | tuple) else [given]
    directions = 2 if both_ways else 1
    count = len(weights) // layers
    finals: list[list[fx.Node]] = []
    parts: list[fx.Node] = []

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta.update(told(node))
        if with_values:
            with x.meta["val"].fake_mode, torch.no_grad():
                made.meta["val"] = target(*fx.map_arg(args, lambda source: source.meta["val"]))
        return made

    with graph.inserting_before(node):
        if batch_first:  # eager draws the masks with time in front
            x = call(aten.transpose.int, x, 0, 1)
        for layer in range(layers):
            if layer:
                x = call(aten.dropout.default, x, rate, True)
            first = layer * directions
            own = [call(aten.slice.Tensor, state, 0, first, first + directions) for state in states]
            part = list(weights[layer * count : (layer + 1) * count])
            hidden = own if isinstance(given, list | tuple) else own[0]
            made = call(node.target, x, hidden, part, has_biases, 1, 0.0, True, both_ways, False)
            parts.append(made)
            x = call(operator.getitem, made, 0)
            finals.append([call(operator.getitem, made, 1 + index) for index in range(len(states))])
        if batch_first:
            x = call(aten.transpose.int, x, 0, 1)
        results = [x, *(call(aten.cat.default, list(group), 0) for group in zip(*finals, strict=True))]
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return parts
