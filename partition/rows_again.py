"""Rows computed again: a choice -> one that saves a product where it saved a softmax of it that nothing else stores.

A softmax that is dropped out in the kernel that computes it is written only to be saved, beside the product that it is
of, which the forward writes in any case. Saved in its place, the product costs no memory traffic; the backward reads
as many bytes, and computes the softmax in the kernel that reads it: for machines that wait for memory there.
"""

from __future__ import annotations

from dataclasses import replace

from partition.cost import is_item, is_view, product, read_by_kernel
from partition.graph import Graph
from partition.ops import CHEAP, ROW
from partition.strategy import Choice

__all__ = ["with_rows_again"]


def with_rows_again(graph: Graph, choice: Choice) -> Choice:
    """The choice with products in the place of rows that are made of them by cheap arithmetic with parameters."""
    saved = {}
    for name, reason in choice.saved.items():
        source = _source(graph, name)
        if source is None:
            saved[name] = reason
        else:
            saved[source] = f"saved for {name}, which is made of it again"
    return replace(choice, saved=saved)


def _source(graph: Graph, name: str) -> str | None:
    """The product that a saved row is computed from, if it is in memory, no larger, and the row is not."""
    node = graph.nodes[name]
    if node.op not in ROW or name in graph.output_index or read_by_kernel(graph, name, graph.forward):
        return None
    found = node.inputs[0] if len(node.inputs) == 1 else None
    while found is not None and not _is_of_a_product(graph, found):
        found = _operand(graph, found)
    if found is None or found not in graph.forward or graph.nodes[found].bytes > node.bytes:
        return None
    return found


def _is_of_a_product(graph: Graph, name: str) -> bool:
    """Whether a value is what a product computes, or one of several."""
    node = graph.nodes[name]
    return product(graph.nodes[node.inputs[0]] if is_item(graph, node) else node) is not None


def _operand(graph: Graph, name: str) -> str | None:
    """The operand of cheap arithmetic that is no parameter, or of a view; ``None`` if there is not exactly one."""
    node = graph.nodes[name]
    if node.op not in CHEAP and not is_view(node):
        return None
    others = [read for read in node.inputs if graph.nodes[read].value is not None]
    return others[0] if len(others) == 1 else None
