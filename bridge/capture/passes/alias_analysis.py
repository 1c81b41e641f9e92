"""Alias analysis: a training graph → classes of nodes that may share memory, and whether autograd may track them.

The graph is not functional yet: operators write in place and return views, as their schemas say.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported
from bridge.base.torch_internals import OpOverload, aten, pytree, schema
from bridge.base.torch_recording import own_operator
from bridge.capture.rows import memory_of

STOP_GRADIENT = own_operator("stop_gradient(Tensor x) -> Tensor", torch.clone, torch.empty_like)
OVERWRITTEN = own_operator(
    "overwritten(Tensor x, str name) -> Tensor", lambda x, name: x.clone(), lambda x, name: torch.empty_like(x)
)
"""A copy of an input's memory now; if it is saved for the backward, the backward reads the memory at its own time."""


def _schema_arguments(node: fx.Node) -> list[tuple[torch.Argument, fx.Node]]:
    """The tensor arguments of an operator call, each with its declaration."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    declared = schema(node.target).arguments
    pairs = list(zip(declared, node.args, strict=False))
    pairs += [(argument, node.kwargs[argument.name]) for argument in declared if argument.name in node.kwargs]
    return [
        (argument, item)
        for argument, value in pairs
        for item in (value if isinstance(value, list | tuple) else [value])
        if isinstance(item, fx.Node)
    ]


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator call writes into."""
    return [
        value for argument, value in _schema_arguments(node) if argument.alias_info and argument.alias_info.is_write
    ]


def aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result may share, if any."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0]
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if not any(returned.alias_info for returned in schema(node.target).returns):
        return None
    return next((value for argument, value in _schema_arguments(node) if argument.alias_info), None)


def memory_at(node: fx.Node) -> list[int | None]:
    """The memory of each of a node's result tensors in eager."""
    if MEMORY in node.meta:
        return node.meta[MEMORY]
    return [memory_of(each) for each in pytree.tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor)]


def refused_at(node: fx.Node, reason: str, *hint: str) -> Unsupported:
    """The refusal of a node's operator."""
    return Unsupported(str(node.target), node.meta.get(WHERE, "forward"), reason, *hint)


def is_view(node: fx.Node) -> bool:
    """Whether a node's result may share memory with one of its arguments, without a write."""
    return aliased(node) is not None and not written(node)


def is_detach(node: fx.Node) -> bool:
    """Whether a node is an alias that autograd does not track."""
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


class Aliases:
    """Classes of nodes that may share memory.

    Args:
        nodes: the nodes of one graph, in order.
        requires_grad: whether a placeholder requires grad.
        cut: nodes that start a class of their own although their operator returns an alias.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        requires_grad: Callable[[fx.Node], bool],
        cut: Callable[[fx.Node], bool] = lambda node: False,
    ):
        self.order = {node: position for position, node in enumerate(nodes)}
        self.root: dict[fx.Node, fx.Node] = {}
        self._classes: dict[fx.Node, list[fx.Node]] = {}
        self._detached: set[fx.Node] = set()  # aliases that autograd does not track
        for node in self.order:
            source = aliased(node)
            root = self.root[node] = node if source is None or cut(node) else self.root[source]
            self._classes.setdefault(root, []).append(node)
            if is_detach(node) or source in self._detached:
                self._detached.add(node)
        self._followed = {node for node in self.order if node.op == "placeholder" and requires_grad(node)}
        self._followed_though_detached: set[fx.Node] = set()  # written through a detached alias
        self._spread()

    def _spread(self) -> None:
        """Marks a class as tracked if its first member reads a tracked value, or one is written into it."""
        size = -1
        while size != len(self._followed) + len(self._followed_though_detached):
            size = len(self._followed) + len(self._followed_though_detached)
            for node in self.order:
                if node.target is STOP_GRADIENT or not any(self._passes_on(source) for source in node.all_input_nodes):
                    continue
                if node not in self._detached:  # also the new result of an operator that writes another argument
                    self._followed.add(self.root[node])
                for target in written(node):
                    self._followed.add(self.root[target])
                    if target in self._detached:
                        self._followed_though_detached.add(self.root[target])

    def _passes_on(self, source: fx.Node) -> bool:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            return False  # autograd tracks no integers and masks
        root = self.root[source]
        return root in (self._followed_though_detached if source in self._detached else self._followed)

    def followed(self, node: fx.Node) -> bool:
        """Whether autograd may track a value with a node's memory (never wrongly ``False``)."""
        return self.root[node] in self._followed

    def writes(self) -> dict[fx.Node, list[fx.Node]]:
        """First member of a class -> the nodes that write into the class, in order."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.order:
            for root in dict.fromkeys(self.root[each] for each in written(node)):
                found.setdefault(root, []).append(node)
        return found

    def class_of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that may share memory with ``node``, in order."""
        return self._classes[self.root[node]]

    def used_after(self, node: fx.Node, moment: fx.Node) -> bool:
        """Whether memory of ``node`` is used after ``moment`` in the graph's order.

        Memory that the caller can see, placeholders and results, counts as read at the end.
        """
        members = self.class_of(node)
        used = (self.order[user] > self.order[moment] for member in members for user in member.users)
        return members[0].op == "placeholder" or any(used)


# Keys of a training graph's ``meta`` with facts of the row that a node is from, which passes hand on.


ROW = "row"
"""The index of the row."""
MEMORY = "memory"
"""The memory of a node's results, if ``meta["val"]`` is a stand-in with separate memory."""
OF = "of"
"""The row's operator, of a node that has the row's results."""
STOPPED = "stopped"
"""Present if autograd does not track an operator because grad mode is off."""

WHERE, PATH = "where", "path"
"""The user's line, and the dotted path of the innermost module that ran; absent if it is unknown or the outermost."""

_KEYS = (WHERE, PATH, ROW, STOPPED)


def told(node: fx.Node) -> dict[str, Any]:
    """The part of a node's ``meta`` that a node in its place, or before it, inherits."""
    return {key: node.meta[key] for key in _KEYS if key in node.meta}


# Writes through views: windows (``unfold``) and expanded tensors → equal views that functionalization writes exactly.
#
# Functionalization implements a write to a view by a new base. For these two operators torch uses the formula of their
# *gradient*: elements in no window become 0, and ``base + sum(view - base)`` is nan for an infinite base, and rounded
# for a large one. Here slices cut the windows, and a tensor that is not really expanded gets axes of extent 1. torch
# writes both back element by element. Other windows and really expanded tensors are refused.


_EXPANDED = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
_EXPANDED_LISTS = (aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing)
"""Operators whose results are expanded views, although their schemas do not say so."""

_ALWAYS_VIEWS = (operator.getitem, aten.select.int, aten.slice.Tensor)
"""Operators whose results are views at any position, a symbolic one included."""

Steps = list[tuple[Any, tuple]]
"""A chain of operators, each with its arguments after the first."""


def write_through_views(graph: fx.Graph) -> list[Unsupported]:
    """Rewrites written views of a training graph in place → refusals of writes that stay inexact."""
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
            is_window = view.target is aten.unfold.default
            what = "windows that overlap or leave a rest" if is_window else "a tensor that is expanded"
            hint = "write to the tensor itself"
            problems.append(refused_at(write, f"writes in place through a view of {what}", hint))
            continue
        _replace(graph, view, steps)
    return problems


def _memory_of(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result shares, or ``None``. ``contiguous`` and ``reshape`` of an expanded
    tensor copy, which their schemas leave open."""
    source = aliased(node)
    if source is None or node.target in _ALWAYS_VIEWS or written(node):
        return source
    values = [each.meta.get("val") for each in (source, node)]
    if any(each is None for each in values) or values[0].fake_mode.shape_env is not None:
        return source
    return None if set(memory_at(source)).isdisjoint(memory_at(node)) else source


def _steps(view: fx.Node) -> Steps | None:
    """A chain of views from a view's base to the same elements, or ``None``."""
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
    """``unfold`` as slices and a reshape, for windows that do not overlap; ``None`` for others."""
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
    """Applies the operators of ``steps`` to a view's base, in place of the view."""
    value = view.args[0]
    with graph.inserting_before(view):
        for op, args in steps:
            made = graph.call_function(op, (value, *args))
            given: torch.Tensor = value.meta["val"]
            with given.fake_mode:
                made.meta["val"] = op(given, *args)
            made.meta.update(told(value))
            value = made
    view.replace_all_uses_with(value)
    graph.erase_node(view)
