"""Written views: windows (``unfold``) and expanded tensors that are written through → views that are written exactly.

Functionalization writes to a view by making its base anew. For these two operators torch makes it by the formula of
their *gradient*: elements in no window become 0, and ``base + sum(view - base)`` is no number where the base is
infinite, and a rounded one where it is large. Here such windows are cut by slices, and a tensor that is not really
expanded gets axes of extent 1, both of which torch writes back element by element; other windows and expanded tensors
are refused.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported, user_line
from bridge.base.torch_internals import aten
from bridge.capture.passes.alias_analysis import aliased, memory_at, told, written

__all__ = ["write_through_views"]

_EXPANDED = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
_EXPANDED_LISTS = (aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing)
"""Operators whose results are expanded views, although their schemas do not say so."""

_ALWAYS_VIEWS = (operator.getitem, aten.select.int, aten.slice.Tensor)
"""Also at positions that nothing is known of."""

Steps = list[tuple[Any, tuple]]
"""Operators that are applied one after the other, each with its arguments behind the first."""


def write_through_views(graph: fx.Graph) -> list[Unsupported]:
    """Rewrites a training-IR graph in place; returns what it cannot express."""
    found: dict[fx.Node, fx.Node] = {}
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for target in written(node):
            view: fx.Node | None = target
            while view is not None and view not in seen:
                seen.add(view)
                if view.target in (*_EXPANDED, *_EXPANDED_LISTS, aten.unfold.default):
                    found[view] = node
                view = _memory_of(view)
    problems = []
    for view, write in found.items():
        steps = _steps(view)
        if steps is None:
            where = user_line(write.meta.get("stack_trace")) or "a line that is not known"
            is_window = view.target is aten.unfold.default
            what = "windows that overlap or leave a rest" if is_window else "a tensor that is expanded"
            reason = f"writes in place through a view of {what}"
            problems.append(Unsupported(str(write.target), where, reason, "write to the tensor itself"))
            if is_window:  # a copy can be written: decomposition fails at windows that overlap, with less to say
                _follow(graph, view, [(aten.clone.default, ())])
            continue
        _replace(graph, view, steps)
    return problems


def _memory_of(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result shares: ``contiguous`` or ``reshape`` of an expanded tensor is a copy,
    which their schemas leave open."""
    source = aliased(node)
    if source is None or node.target in _ALWAYS_VIEWS or written(node):
        return source
    values = [each.meta.get("val") for each in (source, node)]
    if any(each is None for each in values) or values[0].fake_mode.shape_env is not None:
        return source
    return None if set(memory_at(source)).isdisjoint(memory_at(node)) else source


def _steps(view: fx.Node) -> Steps | None:
    """Views that lead from a view's base to the same elements; ``None`` where there are none."""
    if view.target in _EXPANDED_LISTS:
        return None
    shapes = [tuple(each.meta["val"].shape) for each in (view.args[0], view)]
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        return None
    if view.target is aten.unfold.default:
        return _windows(shapes[0], *view.args[1:])
    base, expanded = shapes
    more = len(expanded) - len(base)
    if expanded != (1,) * more + base:
        return None
    return [(aten.unsqueeze.default, (0,))] * more or [(aten.alias.default, ())]


def _windows(shape: tuple[int, ...], dim: int, size: int, step: int) -> Steps | None:
    """``unfold`` as slices: windows without gaps in an axis of their own, of which each is cut to its size."""
    if not shape:
        return None
    dim %= len(shape)
    extent, rank = shape[dim], len(shape)
    count = (extent - size) // step + 1
    if count == 1:
        step = size
    if size > step or not size:
        return None
    if size == 1:  # the last window may be shorter than a step
        return [(aten.slice.Tensor, (dim, 0, (count - 1) * step + 1, step)), (aten.unsqueeze.default, (rank,))]
    if count * step > extent:
        return None
    split = (*shape[:dim], count, step, *shape[dim + 1 :])
    order = [axis for axis in range(rank + 1) if axis != dim + 1] + [dim + 1]
    return [
        (aten.slice.Tensor, (dim, 0, count * step)),
        (aten.view.default, (list(split),)),
        (aten.slice.Tensor, (dim + 1, 0, size)),
        (aten.permute.default, (order,)),
    ]


def _replace(graph: fx.Graph, view: fx.Node, steps: Steps) -> None:
    made = _apply(graph, view, view.args[0], steps)
    view.replace_all_uses_with(made)
    graph.erase_node(view)


def _follow(graph: fx.Graph, view: fx.Node, steps: Steps) -> None:
    made = _apply(graph, view.next, view, steps)
    view.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _apply(graph: fx.Graph, before: fx.Node, value: fx.Node, steps: Steps) -> fx.Node:
    """``value`` with the operators of ``steps`` applied to it, in front of a node."""
    with graph.inserting_before(before):
        for op, args in steps:
            made = graph.call_function(op, (value, *args))
            given: torch.Tensor = value.meta["val"]
            with given.fake_mode:
                made.meta["val"] = op(given, *args)
            made.meta.update(told(value))
            value = made
    return value
