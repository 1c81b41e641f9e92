"""Accumulation: a sum of two products → the later product, added onto the earlier one in its memory.

Where an input feeds several products (the query, key and value of an attention), its gradient is a sum of products. A
product that starts from what is there saves writing its own result and reading both.

Rounding differs from that of a sum of finished products by the order of the additions, and whether a sum is made this
way depends on who else reads its terms. So this is for functions whose results need not be the same bits whatever is
captured: backwards (see :func:`bridge.compile.compile_function`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autodiff.extents import same
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Product, Value, whole
from bridge.compile.loop_ir.views import is_dense

__all__ = ["accumulate"]


def accumulate(graph: Graph) -> Graph:
    """The graph with sums of two products that nothing else reads made by the later product."""
    readers = Counter(
        operand.value for node in graph.nodes for operand in node.operands if isinstance(operand, Operand)
    )
    readers.update(operand.value for operand in graph.results)
    nodes: list[Node] = []
    position: dict[Value, int] = {}
    for node in graph.nodes:
        terms = _terms(node, nodes, position, readers)
        if terms is None:
            position.update((out, len(nodes)) for out in node.outs)
            nodes.append(node)
            continue
        first, second = terms
        place = position[second]
        # The sum may have another shape of the same elements: both lie in memory in the same order.
        nodes[place] = replace(
            nodes[place],
            operands=(*nodes[place].operands, whole(first)),
            out=node.out,
            onto=first,
        )
        position[node.out] = place
    return replace(graph, nodes=nodes) if len(nodes) != len(graph.nodes) else graph


def _terms(
    node: Node, nodes: list[Node], position: dict[Value, int], readers: Counter[Value]
) -> tuple[Value, Value] | None:
    """The products that an addition adds, the one that is made first before the other."""
    if type(node) is not Pointwise or node.op != "add":
        return None
    for operand in node.operands:
        if not isinstance(operand, Operand) or operand.value not in position or readers[operand.value] != 1:
            return None
        aligned = is_dense(operand.view) and same(operand.view.offset, 0) and same(operand.value.numel, node.out.numel)
        if not aligned or not isinstance(nodes[position[operand.value]], Product):
            return None
    first, second = sorted((operand.value for operand in node.operands), key=position.__getitem__)
    return None if nodes[position[second]].onto else (first, second)
