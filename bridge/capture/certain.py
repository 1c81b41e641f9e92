"""Certain flags: a uniform draw compared with a number that it never reaches → what the comparison always tells.

``torch.rand([]) < self.layerdrop`` where nothing is to be dropped: forward reads it at each call, and a program that
checks it beside its results would have the host wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from bridge.base.devices import HOST
from bridge.base.torch_internals import OpOverload, aten

__all__ = ["certain"]

_COMPARISONS: Mapping[OpOverload, Callable[[float], bool | None]] = {
    aten.lt.Scalar: lambda number: False if number <= 0 else True if number >= 1 else None,
    aten.ge.Scalar: lambda number: True if number <= 0 else False if number >= 1 else None,
    aten.le.Scalar: lambda number: False if number < 0 else True if number >= 1 else None,
    aten.gt.Scalar: lambda number: True if number < 0 else False if number >= 1 else None,
}
"""Of a number from 0 to less than 1 with another one."""
_DRAWS = (aten.rand.default, aten.rand_like.default)
_MOVES = (aten.alias.default, aten.clone.default, aten.detach.default)


def certain(node: fx.Node) -> tuple[bool, list[fx.Node]] | None:
    """What a flag always is, and the nodes that it is computed by; ``None`` where nobody knows."""
    nodes = _with_moved(node)
    compares = _COMPARISONS.get(nodes[-1].target)
    if compares is None:
        return None
    x, number = nodes[-1].args
    nodes += _with_moved(x)
    if not _is_uniform(nodes[-1]) or not isinstance(number, int | float) or number != number:
        return None
    found = compares(torch.tensor(number, dtype=nodes[-1].meta["val"].dtype, device=HOST).item())
    return None if found is None else (found, nodes[::-1])


def _with_moved(node: fx.Node) -> list[fx.Node]:
    """A node, and those that it moves, to the one that computes the numbers."""
    nodes = [node]
    while nodes[-1].target in _MOVES:
        nodes.append(nodes[-1].args[0])
    return nodes


def _is_uniform(node: fx.Node) -> bool:
    """In a type that rounds no number below 1 to 1."""
    return node.target in _DRAWS and node.meta["val"].dtype in (torch.float32, torch.float64)
