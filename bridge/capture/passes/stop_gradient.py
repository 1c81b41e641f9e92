"""Stop-gradient: ``detach`` and grad modes of a training graph → ``tvm_dispatch::stop_gradient``, in place.

A functional graph has no grad modes. So before it is made, what an operator reads that ran under ``no_grad`` is
passed through ``tvm_dispatch::stop_gradient``, an operator of ours that decompositions leave alone; ``detach``
becomes that operator, too. ``stop_gradient`` is a copy, ``detach`` is an alias: where autograd follows nothing there is
nothing to stop and the alias stays an alias, and where a write would tell the two apart, the module is refused.

``meta["custom"]``, which decomposition hands on, says which node of the training IR a node came from and where that
stands in the user's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported, user_line
from bridge.base.torch_internals import OpOverload, aten
from bridge.capture.own_functions import OWN
from bridge.capture.passes.alias_analysis import Aliases, is_detach, is_view, written
from bridge.capture.passes.attention import choose_for_learned_masks
from bridge.capture.passes.recurrent import keep_layers_whole
from bridge.capture.passes.straight_through import write_straight_through
from bridge.capture.passes.told import STOPPED
from bridge.capture.passes.written_views import write_through_views

__all__ = ["STOP_GRADIENT", "prepare", "where_is"]


_library = torch.library.Library("tvm_dispatch", "DEF")
_library.define("stop_gradient(Tensor x) -> Tensor")
_library.impl("stop_gradient", torch.clone, "CompositeExplicitAutograd")
_library.impl("stop_gradient", torch.empty_like, "Meta")
STOP_GRADIENT = torch.ops.tvm_dispatch.stop_gradient.default


def prepare(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """Rewrites a training graph in place as described above, whose nodes are told where autograd stops."""
    _detach_stopped(graph)
    keep_layers_whole(graph)
    choose_for_learned_masks(graph, requires_grad)
    _pass_through(graph)
    _word_assertions(graph)
    write_straight_through(graph, requires_grad, STOP_GRADIENT)
    problems = _stop_gradients(graph, requires_grad)
    problems += write_through_views(graph)
    problems += _wrong_in_torch(graph, requires_grad)
    for node in graph.nodes:
        if node.op == "call_function":
            told = {"where": user_line(node.meta.get("stack_trace")), OWN: node.meta.get(OWN)}
            node.meta["custom"] = {"origin": node.name, **{key: value for key, value in told.items() if value}}
    graph.lint()
    return problems


def _detach_stopped(graph: fx.Graph) -> None:
    """What an operator reads that autograd does not follow passes through ``detach``, and what it gives if it is a view
    of that."""
    for node in [node for node in graph.nodes if STOPPED in node.meta and isinstance(node.target, OpOverload)]:
        if not is_view(node):
            _detach_reads(graph, node)
            continue
        items = isinstance(node.meta.get("val"), tuple | list)
        for result in list(node.users) if items else [node]:
            with graph.inserting_after(result):
                own = _detached(graph, result)
            if own is not result:
                result.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)


def _wrong_in_torch(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """``as_strided_scatter`` of the user's own, where a gradient flows through its input.

    torch's derivative of it passes the gradient on where the source was written. Ours does not (functionalization makes
    the operator of writes whose derivative is right in eager), so neither the right numbers nor eager's can be given.
    """
    found = [node for node in graph.nodes if node.target is aten.as_strided_scatter.default]
    if not found:
        return []
    aliases = Aliases(graph.nodes, requires_grad, cut=lambda node: False)
    reason = "torch's own derivative of it is wrong where the source is written, and ours would differ from eager's"
    return [
        Unsupported(
            str(node.target),
            user_line(node.meta.get("stack_trace")) or "forward",
            reason,
            "write through x.as_strided(...)",
        )
        for node in found
        if aliases.followed(node.args[0])
    ]


def _pass_through(graph: fx.Graph) -> None:
    """A dropout that drops nothing returns its argument itself, so a write to the one is seen in the other.

    torch's decomposition makes a copy of it.
    """
    for node in list(graph.nodes):
        if node.target is aten.dropout.default and (not node.args[2] or node.args[1] == 0):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _word_assertions(graph: fx.Graph) -> None:
    """Assertions without a message get one: decomposition takes those for dead code."""
    for node in graph.nodes:
        if node.target is aten._assert_async.default:
            node.target, node.args = aten._assert_async.msg, (*node.args, "a tensor that is asserted is zero")


def _stop_gradients(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """``detach`` of what autograd follows becomes ``stop_gradient``; of anything else, its argument."""
    aliases = Aliases(graph.nodes, requires_grad, cut=lambda node: False)
    stopped = Aliases(graph.nodes, requires_grad, cut=lambda node: is_detach(node) and aliases.followed(node))
    problems = []
    for node in [node for node in graph.nodes if is_detach(node)]:
        source = node.args[0]
        if not aliases.followed(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        node.target = STOP_GRADIENT
        sides = (node, source), (source, node)
        if any(
            stopped.used_after(one, node, writes=True) and stopped.used_after(other, node, writes=False)
            for one, other in sides
        ):
            where = user_line(node.meta.get("stack_trace")) or "a line that is not known"
            reason = "memory that is written in place is seen by autograd and, detached, under another name"
            problems.append(Unsupported("detach", where, reason, "clone first"))
    return problems


def where_is(node: fx.Node) -> str | None:
    """The user's source line of a node, if known."""
    return (node.meta.get("custom") or {}).get("where") or user_line(node.meta.get("stack_trace"))


def _detach_reads(graph: fx.Graph, node: fx.Node) -> None:
    """Passes what an operator reads through ``detach``; what it writes stays the memory that it is."""
    targets = written(node)
    with graph.inserting_before(node):
        seen = {source: source if source in targets else _detached(graph, source) for source in node.all_input_nodes}
    node.args = fx.map_arg(node.args, seen.__getitem__)
    node.kwargs = fx.map_arg(node.kwargs, seen.__getitem__)


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node) or not _is_float(value.meta.get("val")):
        return value
    made = graph.call_function(aten.detach.default, (value,))
    made.meta = dict(value.meta)
    return made


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
