"""Form choice: a graph's library calls → the same calls in the forms that a tuning has chosen for their classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge.compile.loop_ir.graph import Graph
from bridge.compile.schedule.calls import CallShape

__all__ = ["calls_in", "choose_forms"]


def calls_in(graph: Graph) -> list[CallShape]:
    """The classes of a graph's calls that have several forms, each once, in their order."""
    found = map(CallShape.of, graph.nodes)
    return list(dict.fromkeys(shape for shape in found if shape is not None))


def choose_forms(graph: Graph, chosen: Sequence[tuple[CallShape, str]]) -> Graph:
    """The graph with calls in the forms that are chosen for their classes; the others stay.

    Safe: a form has the arguments and the results of the function itself, to rounding.
    """
    forms = dict(chosen)
    nodes = [
        replace(node, name=forms[shape]) if (shape := CallShape.of(node)) in forms else node for node in graph.nodes
    ]
    return replace(graph, nodes=nodes)
