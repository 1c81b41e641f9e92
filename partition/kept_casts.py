"""Casts of parameters: a choice -> one that also saves what the forward has cast for a product and the backward reads.

Autocast casts each weight once per step, and keeps that until the backward is over. A cast that is made again reads
the weight and writes the copy again, which on a GPU takes a good part of the time of a small batch.
"""

from __future__ import annotations

from dataclasses import replace

from partition.cost import product, view_base
from partition.graph import Graph
from partition.ops import VIEWS
from partition.strategy import Choice

__all__ = ["with_kept_casts"]


def with_kept_casts(graph: Graph, choice: Choice, parameters: int) -> Choice:
    """The choice with casts of the first ``parameters`` primals, of those that products of the forward read."""
    weights = set(graph.primals[:parameters])
    kept = {
        name: "kept: the forward has cast this parameter, as autocast's cache would"
        for name in graph.nodes
        if name in graph.forward
        and graph.nodes[name].op == "relax.astype"
        and all(view_base(graph, read) in weights for read in graph.nodes[name].inputs)
        and _is_for_products(graph, name)
    }
    return replace(choice, saved={**choice.saved, **kept})


def _is_for_products(graph: Graph, name: str) -> bool:
    readers = [graph.nodes[reader] for reader in graph.users[name] if reader in graph.forward]
    return any(
        product(node) is not None or (node.op in VIEWS and _is_for_products(graph, node.name)) for node in readers
    )
