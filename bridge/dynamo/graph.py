"""Dynamo's graphs in the form that :mod:`bridge.capture.record_call` takes: a module, its arguments, its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from bridge.base.torch_internals import enter_autocast, exit_autocast, get_data_attribute
from bridge.dynamo.sizes import GraphSizes

__all__ = ["DynamoGraph", "inline_checkpoints"]

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def inline_checkpoints(graph_module: fx.GraphModule) -> None:
    """Makes the body of each ``torch.utils.checkpoint`` part of the graph, in place, nested ones included.

    In Dynamo's graph such a region is an operator that promises to compute the body again in the backward. What is
    computed again is our partition's decision, so the body is all that counts. It must not be left to the operator
    even where the graph runs eager: run so, it draws new dropout masks when it computes the body again.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=_CHECKPOINT):
        body, *arguments = node.args
        inline_checkpoints(getattr(graph_module, body.target))
        _, kwargs = _CHECKPOINT.divide_kwargs(node.kwargs)
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(body.target, tuple(arguments), kwargs)
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph_module.graph.erase_node(node)
        if not body.users:
            graph_module.graph.erase_node(body)
    graph_module.recompile()


class DynamoGraph(nn.Module):
    """A graph of Dynamo's as a module whose buffers are those inputs that it may change in place.

    Inputs that require no grad and are dense can be buffers: whatever is written to them is then an output of the
    traced graph, and is written back. All others are arguments, and writing to those is unsupported.

    Args:
        sizes: where sizes are to vary. Tensors that have such a size are arguments; numbers that are one are neither,
            but read off a tensor.
    """

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], sizes: GraphSizes | None = None):
        super().__init__()
        varying = sizes.tensors if sizes is not None else frozenset()
        self._numbers = sizes.numbers if sizes is not None else {}
        if _owns_tensors(graph_module):
            self.graph_module = graph_module
        self._graph = (graph_module,)  # not a submodule: each graph's class is its own, and equal ones are to be found
        self.input_of: dict[str, int] = {}
        for position, value in enumerate(inputs):
            if position not in varying and _may_be_buffer(value):
                self.input_of[f"input_{position}"] = position
                self.register_buffer(f"input_{position}", value.detach().clone())
        self._count = len(inputs)
        given = {*self.input_of.values(), *self._numbers}
        self.arguments = tuple(position for position in range(len(inputs)) if position not in given)

    def forward(self, *arguments: Any) -> Any:
        inputs: list[Any] = [None] * self._count
        for position, value in zip(self.arguments, arguments, strict=True):
            inputs[position] = value
        for name, position in self.input_of.items():
            inputs[position] = getattr(self, name)
        for position, (tensor, dimension) in self._numbers.items():
            inputs[position] = inputs[tensor].shape[dimension]
        return _Interpreter(self._graph[0]).run(*inputs)


class _Interpreter(fx.Interpreter):
    """Runs a graph so that whoever traces sees the user's source lines, and autocast regions as the user wrote them.

    In Dynamo's graph a region begins with a function that, while something traces, only says so and casts nothing.
    """

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is enter_autocast:
            region = torch.autocast(*args, **kwargs)
            region.__enter__()
            return region
        if target is exit_autocast:
            return args[0].__exit__(None, None, None)
        if target is get_data_attribute:  # tensor.data, which cannot be traced
            return args[0].detach()
        return super().call_function(target, args, kwargs)


def _owns_tensors(graph_module: fx.GraphModule) -> bool:
    """Whether the graph reads tensors that are no inputs of its own: they are then found on the module."""
    read = graph_module.graph.find_nodes(op="get_attr")
    attributes = (getattr(graph_module, node.target, None) for node in read)
    owned = (*graph_module.parameters(), *graph_module.buffers(), *attributes)
    return any(isinstance(value, torch.Tensor) for value in owned)


def _may_be_buffer(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.layout is torch.strided
        and torch.ops.aten.is_non_overlapping_and_dense(value)
    )
