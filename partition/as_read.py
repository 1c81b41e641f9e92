"""Values saved as they are read: a choice -> one that saves heads where it saved what the heads are views of.

Where a permutation is in the way of everybody who reads a saved value, and those are matrix products of a library that
wants operands in order, forward and backward would both copy it into that order. The permuted value has as many bytes;
saved in its place, it is copied once. A permutation that moves the last axis is not passed: rows stay rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partition.graph import Graph
from partition.ops import VIEWS
from partition.permuted import PERMUTATION, keeps_rows
from partition.strategy import Choice

__all__ = ["saved_as_read"]

_OF_MATRICES = ("relax.matmul", "library.biased_product")


def saved_as_read(graph: Graph, choice: Choice) -> Choice:
    """The choice with values behind one chain of views replaced by the last permuted one, where products read that."""
    saved = {}
    for name, reason in choice.saved.items():
        last = name if name in graph.output_index else _last_permuted(graph, name)
        saved[last] = reason
    return replace(choice, saved=saved)


def _last_permuted(graph: Graph, name: str) -> str:
    found, permuted = name, False
    for view in _chain(graph, name):
        permuted = permuted or graph.nodes[view].op == PERMUTATION
        if permuted:
            found = view
    return found if _only_products_read(graph, found) else name


def _only_products_read(graph: Graph, name: str) -> bool:
    """Whether matrix products read a value, or views of it, and nothing that reads in any order."""
    readers = [graph.nodes[reader] for reader in graph.users[name]]
    return all(
        _only_products_read(graph, node.name) if node.op in VIEWS else node.op in _OF_MATRICES for node in readers
    )


def _chain(graph: Graph, name: str) -> Iterator[str]:
    """The views of a value, each the only reader of the one before, as far as rows stay rows."""
    while len(readers := graph.users[name]) == 1:
        node = graph.nodes[readers[0]]
        in_forward = node.name in graph.forward and node.name not in graph.output_index
        if node.op not in VIEWS or not in_forward or node.size != graph.nodes[name].size:
            return
        if node.op == PERMUTATION and not keeps_rows(node.value):
            return
        yield (name := node.name)
