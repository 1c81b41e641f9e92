"""Keeps ``detach`` and ``no_grad`` through decomposition, and every node's origin.

A functional graph has no grad modes. So before it is made, each ``no_grad`` region is inlined with its results passed
through ``tvm_dispatch::stop_gradient``, an operator of ours that decompositions leave alone, and ``detach`` becomes
that operator too. ``meta["custom"]``, which decomposition hands on, says which node of the training IR a node came
from and where that stands in the user's code.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from bridge.errors import Unsupported, user_line
from bridge.recurrent import split_layers

__all__ = ["origin_of", "prepare", "where_is"]

aten = torch.ops.aten

_library = torch.library.Library("tvm_dispatch", "DEF")
_library.define("stop_gradient(Tensor x) -> Tensor")
_library.impl("stop_gradient", torch.clone, "CompositeExplicitAutograd")
_library.impl("stop_gradient", torch.empty_like, "Meta")


def prepare(graph_module: fx.GraphModule) -> list[Unsupported]:
    """Rewrites a training-IR graph in place as described above; returns what it cannot express."""
    problems = _inline_regions(graph_module)
    split_layers(graph_module.graph)
    for node in graph_module.graph.nodes:
        if node.target in (aten.detach.default, aten.detach_.default):
            node.target = torch.ops.tvm_dispatch.stop_gradient.default
        if node.op == "call_function":
            where = user_line(node.meta.get("stack_trace"))
            node.meta["custom"] = {"origin": node.name, **({"where": where} if where else {})}
    graph_module.graph.lint()
    graph_module.recompile()
    return problems


def origin_of(node: fx.Node) -> str:
    """The name of the training-IR node that ``node`` came from."""
    return (node.meta.get("custom") or {}).get("origin", node.name)


def where_is(node: fx.Node) -> str | None:
    """The user's source line of a node, if known."""
    return (node.meta.get("custom") or {}).get("where") or user_line(node.meta.get("stack_trace"))


def _inline_regions(graph_module: fx.GraphModule) -> list[Unsupported]:
    graph = graph_module.graph
    problems = []
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        where = user_line(node.meta.get("stack_trace")) or "a line that torch.export did not keep"
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            problems.append(Unsupported(str(node.target), where, "a higher-order operator"))
            continue
        enabled, region, *arguments = node.args
        inner = getattr(graph_module, region.target).graph
        if any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in inner.nodes):
            problems.append(Unsupported("no_grad and enable_grad", where, "grad modes inside each other"))
            continue
        _inline(graph, node, inner, arguments, stop=not enabled)
    return problems


def _inline(graph: fx.Graph, call: fx.Node, inner: fx.Graph, args: Sequence[fx.Node], *, stop: bool) -> None:
    values: dict[fx.Node, Any] = {}
    arguments = iter(args)
    outputs: list[Any] = []
    with graph.inserting_before(call):
        for node in inner.nodes:
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "output":
                outputs = [values[value] if isinstance(value, fx.Node) else value for value in node.args[0]]
            else:
                values[node] = graph.node_copy(node, values.__getitem__)
                if user_line(node.meta.get("stack_trace")) is None:  # regions keep generated code's lines
                    values[node].meta["stack_trace"] = call.meta.get("stack_trace")
        if stop:
            outputs = [_stopped(graph, output) for output in outputs]
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"a region's result is used by {user.format_node()}")
        user.replace_all_uses_with(outputs[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)


def _stopped(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node) or not value.meta["val"].is_floating_point():
        return value
    stopped = graph.call_function(torch.ops.tvm_dispatch.stop_gradient.default, (value,))
    stopped.meta = dict(value.meta)
    return stopped
