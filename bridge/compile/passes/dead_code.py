"""Dead code elimination: a graph → its nodes that the results need."""

from __future__ import annotations

from dataclasses import replace

from bridge.compile.loop_ir.graph import Graph, Operand
from bridge.compile.schedule.limits import Rules

__all__ = ["eliminate_dead_code"]


def eliminate_dead_code(graph: Graph, _: Rules) -> Graph:
    """The graph without nodes that no result needs: what is computed elsewhere since a pass recomputes it."""
    needed = {output.value for output in graph.results}
    live = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outs):
            live.append(node)
            needed.update(operand.value for operand in node.operands if isinstance(operand, Operand))
    return replace(graph, nodes=live[::-1])
