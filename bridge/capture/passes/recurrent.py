"""Recurrent layers before decomposition: one operator for all layers → one for each.

torch decomposes ``aten.lstm`` and its like into plain operators, but loses the dropout between the layers. So a call
of several layers with dropout becomes calls of one layer each, with the dropout spelled out. And in bfloat16 it would
round at every gate of every step, where eager's kernel (oneDNN's) computes a whole layer in float32: such an LSTM
becomes that kernel.

Under autocast too eager's kernel is that one, in the lower precision; :func:`lstm_as_in_eager` lets ``torch.export``
know the element type that comes out of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from bridge.base.torch_internals import FakeTensor, aten, replaced_formula
from bridge.capture.passes.composites import expand

__all__ = ["final_states_as_in_eager", "lstm_as_in_eager", "split_layers"]


_LAYERED = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def lstm_as_in_eager() -> AbstractContextManager[None]:
    """While modules are traced: an LSTM under autocast has the element type of eager's kernel.

    torch's formula of it for tracing, which knows nothing of that kernel, would give float32, and what the user's code
    does next may depend on it. Where this is mistaken, the module is refused: :mod:`bridge.capture.passes.autocast`
    compares.
    """
    return replaced_formula(aten.lstm.input, _with_eagers_type)


def _with_eagers_type(formula: Callable[..., Any]) -> Callable[..., Any]:
    def lstm(x: torch.Tensor, states: list, weights: list, *options: Any) -> tuple[torch.Tensor, ...]:
        made = formula(x, states, weights, *options)
        projected = states[0].shape[-1] != states[1].shape[-1]
        known = {each.dtype for each in (x, *states, *weights)} <= {torch.float32, torch.bfloat16}
        fused = torch.backends.mkldnn.enabled and known and not projected and x.numel()
        if not torch.is_autocast_enabled("cpu") or not fused:
            return made
        return tuple(each.to(torch.get_autocast_dtype("cpu")) for each in made)

    return lstm


def final_states_as_in_eager() -> AbstractContextManager[None]:
    """While modules are traced and run: an LSTM's final states have the shapes of its initial ones, as eager's have.

    torch's formula of it for tracing gives them, up to torch 2.12, one axis too many where the batch is larger than 1.
    """
    return replaced_formula(aten.lstm.input, _with_eagers_shapes)


def _with_eagers_shapes(formula: Callable[..., Any]) -> Callable[..., Any]:
    def lstm(x: torch.Tensor, states: list, weights: list, *options: Any) -> tuple[torch.Tensor, ...]:
        y, *finals = formula(x, states, weights, *options)
        shaped = [f if f.shape == s.shape else f.reshape(s.shape) for f, s in zip(finals, states, strict=True)]
        return (y, *shaped)

    return lstm


def split_layers(graph: fx.Graph) -> None:
    """Rewrites the recurrent calls of a training-IR graph that draw dropout masks or are in bfloat16, in place."""
    for node in list(graph.nodes):
        values = _bfloat16_values(node) if node.target is aten.lstm.input else {}
        if values and expand(node, values, None):
            continue
        if node.op == "call_function" and node.target in _LAYERED and len(node.args) == 9:
            *_, layers, rate, train, _, _ = node.args
            if layers > 1 and rate and train:
                _split(graph, node)


def _bfloat16_values(node: fx.Node) -> dict[fx.Node, FakeTensor]:
    """Stand-ins for the tensors that a call reads; none if one of them is of another element type."""
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    if not all(isinstance(value, FakeTensor) and value.dtype is torch.bfloat16 for value in values.values()):
        return {}
    return {source: torch.empty_like(value, requires_grad=False) for source, value in values.items()}


def _split(graph: fx.Graph, node: fx.Node) -> None:
    x, given, weights, has_biases, layers, rate, _, both_ways, batch_first = node.args
    states = given if isinstance(given, list | tuple) else [given]
    directions = 2 if both_ways else 1
    count = len(weights) // layers
    finals: list[list[fx.Node]] = []

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta["stack_trace"] = node.meta.get("stack_trace")
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
            x = call(operator.getitem, made, 0)
            finals.append([call(operator.getitem, made, 1 + index) for index in range(len(states))])
        if batch_first:
            x = call(aten.transpose.int, x, 0, 1)
        results = [x, *(call(aten.cat.default, list(group), 0) for group in zip(*finals, strict=True))]
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
