"""Copies: ``x.copy_(y)`` with ``y`` of another type or shape → the same with ``y`` cast and expanded before.

Where ``x`` is a buffer, torch.export takes ``y`` itself for the buffer's new value, of whatever type it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from bridge.base.torch_internals import aten

__all__ = ["spell_out_copies"]


def spell_out_copies(graph: fx.Graph) -> None:
    """Rewrites a training-IR graph in place. Sizes that vary are left as they are."""
    for node in [node for node in graph.nodes if node.target is aten.copy_.default]:
        x, y, *_ = node.args
        if not isinstance(y, fx.Node):
            continue
        to, given, made = (each.meta["val"] for each in (x, y, node))
        if _form(to) == _form(given) or _form(to) != _form(made):  # export's own, of an assignment
            continue
        if not all(isinstance(extent, int) for extent in (*to.shape, *given.shape)):
            continue
        with graph.inserting_before(node):
            if to.dtype != given.dtype:
                y = _emit(graph, node, aten._to_copy.default, (y,), {"dtype": to.dtype})
            if to.shape != given.shape:
                y = _emit(graph, node, aten.expand.default, (y, list(to.shape)), {})
        node.args = (x, y, *node.args[2:])


def _form(value: torch.Tensor) -> tuple:
    return value.dtype, tuple(value.shape)


def _emit(graph: fx.Graph, copied: fx.Node, op: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    made = graph.call_function(op, args, kwargs)
    value = args[0].meta["val"]
    with value.fake_mode:
        made.meta["val"] = op(value, *args[1:], **kwargs)
    made.meta["stack_trace"] = copied.meta.get("stack_trace")
    return made
