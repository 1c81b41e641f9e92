"""Composite operators inside which autocast casts → the operators that they are made of.

A recurrent layer, ``einsum`` or ``multi_dot`` reaches autocast only through the products that it calls. Run on fake
tensors under the autocast setting of its place, such an operator shows what it does there, casts included; that takes
its place in the graph.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from bridge.base.modes import autocast_to
from bridge.base.torch_internals import aten, implements_composite, pytree
from bridge.capture.passes.told import told

__all__ = ["expand", "is_composite"]


def is_composite(node: fx.Node) -> bool:
    """Whether an operator is defined, derivative included, by the operators that it calls."""
    return implements_composite(node.target)


def expand(node: fx.Node, values: dict[fx.Node, torch.Tensor], setting: torch.dtype | None) -> list[fx.Node] | None:
    """Replaces a call of a composite operator by what it does, and returns the new nodes in order.

    Args:
        node: a call in a training-IR graph; it is erased.
        values: fake tensors for the tensors among its arguments.
        setting: what autocast casts to where it stands, ``None`` if it is off.

    ``None``, and nothing is changed, if part of what it does is out of sight below autograd: a ``detach``, or nothing
    taken apart at all.
    """
    sources = list(values)
    mode = next(iter(values.values())).fake_mode

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        of = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: of.get(source, source.meta.get("val")))
        return pytree.tree_leaves(node.target(*args, **kwargs))

    autocast = autocast_to(setting, cache_enabled=False)
    with mode, torch.no_grad(), autocast:
        inner = make_fx(run)(*values.values()).graph
    calls = [each for each in inner.nodes if each.op == "call_function"]
    if any(each.target in (aten.detach.default, node.target) for each in calls):
        return None
    if any(each.op not in ("placeholder", "call_function", "output") for each in inner.nodes):
        return None
    return _put_in_place(node, inner, sources)


def _put_in_place(node: fx.Node, inner: fx.Graph, sources: list[fx.Node]) -> list[fx.Node]:
    copied: dict[fx.Node, fx.Node] = {}
    remaining = iter(sources)
    with node.graph.inserting_before(node):
        for each in inner.nodes:
            if each.op == "placeholder":
                copied[each] = next(remaining)
            elif each.op == "call_function":
                copied[each] = made = node.graph.node_copy(each, copied.__getitem__)
                made.meta = {"val": each.meta.get("val"), **told(node)}
    results = [copied[result] for result in inner.output_node().args[0]]
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.replace_all_uses_with(results[0])
    node.graph.erase_node(node)
    return [each for each in copied.values() if each not in sources]
