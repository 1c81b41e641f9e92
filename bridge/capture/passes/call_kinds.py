"""Kinds of calls: calls of one operator that are alike → one key: the same constants, tensors of the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from bridge.base.torch_shapes import environment, expression, fixed, is_decided
from bridge.state import constant_key

__all__ = ["form", "is_of_sizes", "kind_key", "requires_grad"]


def kind_key(node: fx.Node) -> tuple:
    """Hashable and equal for calls of one kind, as long as their graphs live; the values that they read are tensors."""
    return node.target, _key((node.args, node.kwargs), tuple(node.all_input_nodes))


def _key(value: Any, sources: Sequence[fx.Node]) -> Any:
    """Hashable: constants, the layouts of tensors, and which of them are the same one."""
    if isinstance(value, fx.Node) and is_of_sizes(value):
        return "size", fixed(value.meta["val"])
    if isinstance(value, fx.Node):
        return "tensor", sources.index(value), form(value.meta["val"]), requires_grad(value)
    if isinstance(value, tuple | list):
        return "list", tuple(_key(item, sources) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((name, _key(item, sources)) for name, item in value.items())
    key = constant_key(value)
    return ("object", id(value)) if key is None else key


def form(value: torch.Tensor) -> tuple:
    """Hashable: symbolic sizes by their expressions."""
    return tuple(map(fixed, value.shape)), tuple(map(fixed, value.stride())), value.dtype, value.device


def requires_grad(source: fx.Node) -> bool:
    """Whether a decomposition sees that a tensor requires grad: it runs on what the graph is given, under no_grad."""
    return source.op == "placeholder" and source.meta["val"].requires_grad


def is_of_sizes(node: fx.Node) -> bool:
    """Whether a call gives a number that the sizes of the arguments decide."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat) and is_decided(environment(value), expression(value))
