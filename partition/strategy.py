"""Partition strategy: a graph -> the choice of values to save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from partition.graph import Graph

__all__ = ["Choice", "Strategy"]


@dataclass(frozen=True)
class Choice:
    """The values that a strategy wants saved for the backward.

    ``saved`` maps a node's name to the reason it is saved. Parameters need not be named: they are free, and are read
    wherever the walk from the gradients meets one. What is named but never read is not saved. ``use_outputs`` says
    whether forward outputs are free too.
    """

    saved: Mapping[str, str] = field(default_factory=dict)
    use_outputs: bool = True
    notes: tuple[str, ...] = ()


class Strategy(Protocol):
    """Anything with a ``name`` and a ``choose``; :func:`partition.partition` accepts any such object."""

    @property
    def name(self) -> str:
        """What the plan and its table call this strategy."""

    def choose(self, graph: Graph) -> Choice:
        """The values to save. Must depend on the graph alone, so that the same module always gets the same plan."""
