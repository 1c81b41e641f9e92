"""Positions: a constant ``0, 1, 2, …`` that a larger tensor is computed with → each element's place, where it is read.

A comparison with a row's index, say: on a GPU it would read four bytes of a constant for each element of the row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autodiff.extents import sample_of
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Positions, Scalar, Value, whole
from bridge.compile.schedule.limits import Rules

__all__ = ["count_where_read"]


def count_where_read(graph: Graph, rules: Rules) -> Graph:
    """The graph in which point-wise nodes count what they would read of constants that are smaller by the limit."""
    factor = rules.limits.small_casts
    counts = {value for value, constant in graph.constants.items() if factor and _counts(constant)}
    if not counts:
        return graph
    nodes: list[Node] = []
    for node in graph.nodes:
        if type(node) is Pointwise:
            reads = tuple(_read(operand, node, counts, nodes, factor) for operand in node.operands)
            node = node if reads == node.operands else replace(node, operands=reads)
        nodes.append(node)
    return replace(graph, nodes=nodes)


def _counts(constant: torch.Tensor | Positions) -> bool:
    if isinstance(constant, Positions) or constant.dtype not in (torch.int32, torch.int64) or constant.ndim != 1:
        return False
    return torch.equal(constant, torch.arange(len(constant), dtype=constant.dtype, device=constant.device))


def _read(
    operand: Operand | Scalar, reader: Pointwise, counts: set[Value], nodes: list[Node], factor: int
) -> Operand | Scalar:
    """The operand, or the places that this reader counts, which are added to the nodes."""
    if isinstance(operand, Scalar) or operand.value not in counts:
        return operand
    if factor * sample_of(operand.value.numel) > sample_of(reader.out.numel):
        return operand
    index = Value(operand.value.name, operand.value.shape, "int64", "index")
    out = Value(operand.value.name, operand.shape, operand.dtype)
    nodes.append(Pointwise("astype", (Operand(index, operand.view),), out))
    return whole(out)
