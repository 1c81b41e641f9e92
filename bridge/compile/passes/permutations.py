"""Permutations: a copy of cheap arithmetic in another order → the arithmetic in that order from the start.

A bias is added while the heads are transposed, and where nothing else reads the first order it is never stored.
"""

from __future__ import annotations

from dataclasses import replace

from autodiff.extents import same
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise
from bridge.compile.passes.cheap import Producers, permuted_arithmetic
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.space import share_loops

__all__ = ["arithmetic_of_copy", "recompute_permutations"]


def recompute_permutations(graph: Graph, rules: Rules) -> Graph:
    """The graph with copies of permuted cheap arithmetic computed from the operands of that arithmetic."""
    producers, nodes = Producers(rules.limits), []
    for node in graph.nodes:
        nodes.append(arithmetic_of_copy(node, producers, rules) or node)
        producers.add(nodes[-1])
    return replace(graph, nodes=nodes)


def arithmetic_of_copy(node: Node, producers: Producers, rules: Rules) -> Pointwise | None:
    """What computes a copy's result in one loop nest from the operands of what it copies; ``None``: it stays a copy."""
    if type(node) is not Pointwise or node.op != "copy" or not isinstance(node.operands[0], Operand):
        return None
    (read,) = node.operands
    producer = producers.cheap(read.value)
    moved = None if producer is None else permuted_arithmetic(producer, read)
    if moved is None or same(node.out.numel, 0):
        return None
    views = [operand.view for operand in moved if isinstance(operand, Operand)]
    return Pointwise(producer.op, tuple(moved), node.out) if share_loops(views, node.out.numel, rules) else None
