"""Attention with a learned bias (relative positions, say): the fused operator → what eager makes of it.

The CPU's fused kernel has no gradient for its mask, so eager takes the plain operators where the mask requires grad; on
a GPU it may take the one kernel that has it. What ``torch.export`` decomposes has forgotten what requires grad, and
would take another one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from bridge.base.devices import current_device
from bridge.base.torch_fakes import stand_in
from bridge.base.torch_internals import OpOverload, aten
from bridge.capture.isolated_rng import watched_operators
from bridge.capture.passes.alias_analysis import Aliases
from bridge.capture.passes.told import told

__all__ = ["choose_for_learned_masks"]

_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_POSITIONAL = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}


def choose_for_learned_masks(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> None:
    """Makes attention whose mask autograd follows what eager takes, in a training-IR graph, in place."""
    calls = [node for node in graph.nodes if node.target is aten.scaled_dot_product_attention.default]
    if not calls:
        return
    aliases = Aliases(graph.nodes, requires_grad, cut=lambda node: False)
    for node in calls:
        given = dict(zip(_POSITIONAL, node.args[3:], strict=False))
        mask, rate, causal = ({**_POSITIONAL, **given, **node.kwargs}[name] for name in _POSITIONAL)
        if not isinstance(mask, fx.Node) or not mask.meta["val"].is_floating_point() or not aliases.followed(mask):
            continue  # a mask of truth values, computed from whatever, requires no grad
        options = {name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs}
        with graph.inserting_before(node):
            if _takes_the_efficient_kernel(node, mask):
                options.pop("enable_gqa", None)
                args = (*node.args[:3], _of_all_scores(node, mask), True, rate, causal)
                pair = graph.call_function(_EFFICIENT, args, options)
            else:
                args = (*node.args[:3], mask, rate, causal, None)
                pair = graph.call_function(aten._scaled_dot_product_attention_math.default, args, options)
            result = graph.call_function(operator.getitem, (pair, 0))
        for made in (pair, result):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _takes_the_efficient_kernel(node: fx.Node, mask: fx.Node) -> bool:
    """Whether eager does on tensors like these, of which the mask requires grad. Not where sizes vary."""
    values = {each: each.meta["val"] for each in node.all_input_nodes}
    tensors = [each for each in values.values() if isinstance(each, torch.Tensor)]
    if current_device().type != "cuda" or any(type(size) is not int for each in tensors for size in each.shape):
        return False
    seen: list[OpOverload] = []

    def watch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        seen.append(func)
        return func(*args, **kwargs)

    mode = mask.meta["val"].fake_mode
    with mode, torch.enable_grad():
        values = {source: stand_in(value, mode) for source, value in values.items()}
        values[mask].requires_grad_()
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with watched_operators(watch):
            node.target(*args, **kwargs)
    return _EFFICIENT in seen


def _of_all_scores(node: fx.Node, mask: fx.Node) -> fx.Node:
    """The mask as the kernel takes it: of each batch and head."""
    query, key = (each.meta["val"] for each in node.args[:2])
    extents = [*query.shape[:3], key.shape[2]]
    expanded = node.graph.call_function(aten.expand.default, (mask, extents))
    expanded.meta = {**told(node), "val": mask.meta["val"].expand(extents)}
    return expanded
