"""Alias analysis: a training-IR graph → which nodes share memory, and which memory autograd may follow.

The graph is not functional yet: operators write in place and return views, as their schemas say.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from bridge.base.torch_internals import OpOverload, pytree, schema
from bridge.capture.rows import memory_of

__all__ = ["AUTOCAST", "MEMORY", "OF", "ROW", "STOPPED", "STOP_GRADIENT"]
__all__ += ["Aliases", "aliased", "is_detach", "is_view", "memory_at", "told", "written"]

_library = torch.library.Library("tvm_dispatch", "DEF")
_library.define("stop_gradient(Tensor x) -> Tensor")
_library.impl("stop_gradient", torch.clone, "CompositeExplicitAutograd")
_library.impl("stop_gradient", torch.empty_like, "Meta")
STOP_GRADIENT = torch.ops.tvm_dispatch.stop_gradient.default


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
    """The memory of each tensor that a node gave in eager."""
    if MEMORY in node.meta:
        return node.meta[MEMORY]
    return [memory_of(each) for each in pytree.tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor)]


def is_view(node: fx.Node) -> bool:
    """Whether a node's result may share memory with one of its arguments, without a write."""
    return aliased(node) is not None and not written(node)


def is_detach(node: fx.Node) -> bool:
    """Whether a node is an alias that autograd does not follow."""
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


class Aliases:
    """Classes of nodes that may share memory.

    Args:
        nodes: of one graph, in order.
        requires_grad: whether a placeholder requires grad.
        cut: nodes that start a class of their own although their operator returns an alias.
    """

    def __init__(
        self, nodes: Iterable[fx.Node], requires_grad: Callable[[fx.Node], bool], cut: Callable[[fx.Node], bool]
    ):
        self.order = {node: position for position, node in enumerate(nodes)}
        self.root: dict[fx.Node, fx.Node] = {}
        self._detached: set[fx.Node] = set()  # seen under a name that autograd does not follow
        for node in self.order:
            source = aliased(node)
            self.root[node] = node if source is None or cut(node) else self.root[source]
            if is_detach(node) or source in self._detached:
                self._detached.add(node)
        self._followed = {node for node in self.order if node.op == "placeholder" and requires_grad(node)}
        self._followed_though_detached: set[fx.Node] = set()  # written into under such a name
        self._spread()

    def _spread(self) -> None:
        """A class is followed if what its first member reads, or what is written into it, is. Order is ignored."""
        size = -1
        while size != len(self._followed) + len(self._followed_though_detached):
            size = len(self._followed) + len(self._followed_though_detached)
            for node in self.order:
                if node.target is STOP_GRADIENT or not any(self._passes_on(source) for source in node.all_input_nodes):
                    continue
                targets = written(node)
                if not targets and node not in self._detached:
                    self._followed.add(self.root[node])
                for target in targets:
                    self._followed.add(self.root[target])
                    if target in self._detached:
                        self._followed_though_detached.add(self.root[target])

    def _passes_on(self, source: fx.Node) -> bool:
        root = self.root[source]
        return root in (self._followed_though_detached if source in self._detached else self._followed)

    def followed(self, node: fx.Node) -> bool:
        """Whether autograd may follow a value with this memory (never wrongly ``False``)."""
        return self.root[node] in self._followed

    def class_of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that may share memory with ``node``, in order."""
        return [other for other, root in self.root.items() if root is self.root[node]]

    def used_after(self, node: fx.Node, moment: fx.Node, *, writes: bool) -> bool:
        """Whether memory of ``node`` is read (or, with ``writes``, written) after ``moment`` in the graph's order.

        What the caller can see, placeholders and results, counts as read at the end.
        """
        members = self.class_of(node)
        if not writes and members[0].op == "placeholder":
            return True
        users = {user for member in members for user in member.users if self.order[user] > self.order[moment]}
        return any(not writes or any(self.root[target] is members[0] for target in written(user)) for user in users)


# What the nodes of a training graph are told of the rows that they are from: keys of ``meta`` that passes hand on.


ROW = "row"
"""The index of the row."""
MEMORY = "memory"
"""The memory of what a node gives, where its tensor is a stand-in in memory of its own."""
OF = "of"
"""The row's operator, of a node that gives what the row gave."""
STOPPED = "stopped"
"""Present where autograd does not follow an operator that it would follow, since grad mode is off."""
AUTOCAST = "autocast"
"""What autocast does where the operator stands."""

_KEYS = ("stack_trace", "nn_module_stack", ROW, STOPPED, AUTOCAST)


def told(node: fx.Node) -> dict[str, Any]:
    """What a node that stands in the place of another one, or before it, has of that one's ``meta``."""
    return {key: node.meta[key] for key in _KEYS if key in node.meta}
