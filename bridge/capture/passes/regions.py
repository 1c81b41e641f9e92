"""Regions of the training IR (``torch.export``'s ``no_grad`` and autocast regions) → one graph: of the old capture."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from bridge.base.devices import current_device
from bridge.base.errors import Unsupported, user_line
from bridge.base.modes import autocast_depth
from bridge.base.torch_internals import HigherOrderOperator, set_grad_enabled
from bridge.capture.own_functions import Use
from bridge.capture.passes.alias_analysis import is_view
from bridge.capture.passes.autocast import Place, cast_all
from bridge.capture.passes.link_functions import link_functions
from bridge.capture.passes.stop_gradient import detach_reads, detached, prepare_unstopped
from bridge.capture.passes.told import AUTOCAST

__all__ = ["GradModesInRegions", "link_functions_in_regions", "prepare_regions", "spell_out_casts_in_regions"]

_REGION = torch.ops.higher_order.wrap_with_autocast
_GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def prepare_regions(graph_module: fx.GraphModule, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """Rewrites a training-IR graph in place as described above; returns what it cannot express.

    Args:
        requires_grad: whether a placeholder's tensor requires grad.
    """
    problems = _inline_regions(graph_module)
    problems += prepare_unstopped(graph_module.graph, requires_grad)
    graph_module.recompile()
    return problems


def _inline_regions(graph_module: fx.GraphModule) -> list[Unsupported]:
    graph = graph_module.graph
    problems = []
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        where = user_line(node.meta.get("stack_trace")) or "a line that torch.export did not keep"
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            problems.append(Unsupported(str(node.target), where, "a higher-order operator"))
            continue
        enabled, region, *arguments = node.args
        inner = getattr(graph_module, region.target).graph
        if any(isinstance(n.target, HigherOrderOperator) for n in inner.nodes):
            problems.append(Unsupported("no_grad and enable_grad", where, "grad modes inside each other"))
            continue
        inline(graph, node, inner, arguments, stop=not enabled)
    return problems


def inline(graph: fx.Graph, call: fx.Node, inner: fx.Graph, args: Sequence[fx.Node], *, stop: bool) -> None:
    """Replaces a region's call by what is inside; with ``stop``, autograd follows nothing of it."""
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
                values[node] = copied = graph.node_copy(node, values.__getitem__)
                if user_line(node.meta.get("stack_trace")) is None:  # regions keep generated code's lines
                    copied.meta["stack_trace"] = call.meta.get("stack_trace")
                if stop and not is_view(copied):
                    detach_reads(graph, copied)
        if stop:  # views of what came in; anything else is followed by nobody, and its detach will go again
            outputs = [detached(graph, output) for output in outputs]
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"a region's result is used by {user.format_node()}")
        user.replace_all_uses_with(outputs[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)


class GradModesInRegions(TorchFunctionMode):
    """Sees ``no_grad`` and its kin inside autocast regions, which torch.export 2.13 drops from its graph.

    Attributes:
        problems: one where that happened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[Unsupported] = []
        self._depth = autocast_depth()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        changes = func is set_grad_enabled and args[0] != torch.is_grad_enabled()
        if changes and autocast_depth() > self._depth and not self.problems:
            reason = "a grad mode set inside an autocast region: torch.export forgets it"
            self.problems.append(Unsupported("no_grad inside autocast", "forward", reason, "swap the two contexts"))
        return func(*args, **(kwargs or {}))


def spell_out_casts_in_regions(
    graph_module: fx.GraphModule, ambient: torch.dtype | None, requires_grad: Callable[[fx.Node], bool]
) -> list[Unsupported]:
    """Rewrites a training-IR graph in place as described above; returns what it cannot express.

    Args:
        ambient: what autocast casted to while the graph was traced, ``None`` if it was off.
        requires_grad: whether a placeholder's tensor requires grad.
    """
    problems: list[Unsupported] = []
    place = Place(ambient, torch.is_autocast_cache_enabled())
    _tag_regions(graph_module, place)
    _cast(graph_module, place, requires_grad, problems)
    return problems


def _tag_regions(graph_module: fx.GraphModule, around: Place) -> None:
    """Every node of a region is tagged with the region's setting, then the region becomes part of the graph."""
    for node in _calls(graph_module.graph, _REGION):
        device, dtype, enabled, _, region, *arguments = node.args
        inner = getattr(graph_module, region.target)
        setting = around.dtype if device != current_device().type else dtype if enabled else None
        place = Place(setting)
        _tag_regions(inner, place)
        for each in inner.graph.nodes:
            each.meta.setdefault(AUTOCAST, place)
        inline(graph_module.graph, node, inner.graph, arguments, stop=False)
    for node in _calls(graph_module.graph, _GRAD_REGION):
        _tag_regions(getattr(graph_module, node.args[1].target), node.meta.get(AUTOCAST, around))


def _calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]


def _cast(
    graph_module: fx.GraphModule,
    around: Place,
    requires_grad: Callable[[fx.Node], bool],
    problems: list[Unsupported],
) -> None:
    for node in _calls(graph_module.graph, _GRAD_REGION):
        place = node.meta.get(AUTOCAST, around)
        _cast(getattr(graph_module, node.args[1].target), place, lambda node: False, problems)
    cast_all(graph_module.graph, around, requires_grad, problems)


def link_functions_in_regions(
    graph_module: fx.GraphModule, uses: Sequence[Use], tag: Callable[[fx.Node], None]
) -> list[Unsupported]:
    """Rewrites a graph, and those of its regions, in place; returns what cannot be expressed.

    Args:
        uses: of Functions, by their numbers.
        tag: called with each node of a backward.
    """
    problems: list[Unsupported] = []
    for inner in graph_module.children():
        if isinstance(inner, fx.GraphModule):
            problems += link_functions_in_regions(inner, uses, tag)
    problems += link_functions(graph_module.graph, uses, tag)
    graph_module.recompile()
    return problems
