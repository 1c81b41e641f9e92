"""Computed from: a node → whether one of those that it is computed from is of a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

__all__ = ["computed_from"]


def computed_from(
    node: fx.Node, is_found: Callable[[fx.Node], bool], operands: Callable[[fx.Node], Iterable[fx.Node]]
) -> bool:
    """Whether the node, or one that it reaches through ``operands``, is found; each is asked once."""
    waiting, seen = [node], {node}
    while waiting:
        now = waiting.pop()
        if is_found(now):
            return True
        more = [each for each in operands(now) if each not in seen]
        seen.update(more)
        waiting += more
    return False
