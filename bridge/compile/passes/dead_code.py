"""Dead code elimination: a graph → its nodes that the results need."""

from __future__ import annotations

from dataclasses import replace

from bridge.compile.loop_ir.graph import Graph, needed
from bridge.compile.schedule.limits import Rules

__all__ = ["eliminate_dead_code"]


def eliminate_dead_code(graph: Graph, _: Rules) -> Graph:
    """The graph without nodes that no result needs: what is computed elsewhere since a pass recomputes it."""
    return replace(graph, nodes=needed(graph.nodes, (output.value for output in graph.results)))
