"""Straight-through writes: the clamp inside ``F.gaussian_nll_loss`` → the clamped numbers with a gradient of 1.

It clamps a clone of the variance in place under ``no_grad``: autograd does not hear of it, so what follows passes its
gradient on to the variance as it was. The user's own writes of this kind are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from bridge.base.torch_internals import aten
from bridge.capture.passes.alias_analysis import Aliases
from bridge.capture.passes.told import STOPPED, told

__all__ = ["write_straight_through"]

_FUNCTIONAL = {aten.clamp_.default: aten.clamp.default, aten.clamp_min_.default: aten.clamp_min.default}


def write_straight_through(
    graph: fx.Graph, requires_grad: Callable[[fx.Node], bool], stop_gradient: Callable[..., Any]
) -> None:
    """Rewrites a training-IR graph in place.

    ``x.clamp_(…)`` becomes ``x.copy_(where(y == z, x, y + (x - z)))`` with ``z`` the numbers of ``x`` and ``y`` those
    clamped: ``y`` to the bit, with the gradient of ``x``. What is not clamped is ``x`` itself, infinity included.
    """
    clamps = [node for node in graph.nodes if node.target in _FUNCTIONAL and STOPPED in node.meta]
    if not clamps:
        return
    aliases = Aliases(graph.nodes, requires_grad, cut=lambda node: False)
    for node in [node for node in clamps if aliases.followed(node.args[0])]:
        x, *bounds = node.args
        mode = x.meta["val"].fake_mode

        def emit(op: Any, *args: Any, before: fx.Node = node, mode: Any = mode, **kwargs: Any) -> fx.Node:
            with graph.inserting_before(before):
                made = graph.call_function(op, args, kwargs)
            values = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
            with mode:
                made.meta["val"] = op(*values[0], **values[1])
            made.meta.update(told(before))
            return made

        z = emit(stop_gradient, x)
        y = emit(_FUNCTIONAL[node.target], z, *bounds, **node.kwargs)
        moved = emit(aten.add.Tensor, y, emit(aten.sub.Tensor, x, z))
        through = emit(aten.where.self, emit(aten.eq.Tensor, y, z), x, moved)
        with graph.inserting_before(node):
            copied = graph.call_function(aten.copy_.default, (x, through))
        copied.meta.update(node.meta)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)
