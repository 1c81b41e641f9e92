"""Attention with a learned bias (relative positions, say): the fused operator → the operators that it is made of.

The fused kernel has no gradient for its mask, so eager takes the plain operators where the mask requires grad. What
``torch.export`` decomposes has forgotten what requires grad, and would take the fused kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from bridge.base.torch_internals import aten
from bridge.capture.passes.alias_analysis import Aliases

__all__ = ["unfuse_learned_masks"]

_POSITIONAL = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}


def unfuse_learned_masks(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> None:
    """Makes attention whose mask autograd follows the plain operators, in a training-IR graph, in place."""
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
            args = (*node.args[:3], mask, rate, causal, None)
            pair = graph.call_function(aten._scaled_dot_product_attention_math.default, args, options)
            result = graph.call_function(operator.getitem, (pair, 0))
        for made in (pair, result):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
