"""Dead code elimination: nodes in order → those that the results need."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.compile.loop_ir.graph import Node, Operand

__all__ = ["live_nodes"]


def live_nodes(nodes: Sequence[Node], outputs: Sequence[Operand]) -> list[Node]:
    """The nodes that the outputs need. Others are left where an operator was recomputed in another order."""
    needed = {output.value for output in outputs}
    live = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outs):
            live.append(node)
            needed.update(operand.value for operand in node.operands if isinstance(operand, Operand))
    return live[::-1]
