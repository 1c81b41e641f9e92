"""Casts: a cast of a small tensor that a larger one is computed with → the cast where that is read.

Autocast casts each bias: on a GPU a kernel of its own, which takes longer than what it does. The values are the same,
bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from autodiff.extents import sample_of
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Scalar, Value, whole
from bridge.compile.loop_ir.views import is_dense
from bridge.compile.schedule.limits import Rules

__all__ = ["cast_where_read"]


def cast_where_read(graph: Graph, rules: Rules) -> Graph:
    """The graph in which point-wise nodes cast what they read of tensors that are smaller by the backend's limit."""
    factor = rules.limits.small_casts
    if not factor:
        return graph
    casts: dict[Value, Operand] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if type(node) is Pointwise:
            reads = tuple(_read(operand, node, casts, nodes, factor) for operand in node.operands)
            node = node if reads == node.operands else replace(node, operands=reads)
            if node.op == "astype" and isinstance(reads[0], Operand) and is_dense(reads[0].view):
                casts[node.out] = reads[0]
        nodes.append(node)
    return replace(graph, nodes=nodes)


def _read(
    operand: Operand | Scalar, reader: Pointwise, casts: dict[Value, Operand], nodes: list[Node], factor: int
) -> Operand | Scalar:
    """The operand, or what a cast for this reader alone makes, which is added to the nodes."""
    if isinstance(operand, Scalar) or operand.value not in casts:
        return operand
    if factor * sample_of(operand.value.numel) > sample_of(reader.out.numel):
        return operand
    source, out = casts[operand.value], Value(operand.value.name, operand.shape, operand.dtype)
    view = replace(operand.view, offset=operand.view.offset + source.view.offset)
    nodes.append(Pointwise("astype", (Operand(source.value, view),), out))
    return whole(out)
