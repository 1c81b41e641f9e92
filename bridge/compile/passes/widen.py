"""Wide gradients: a gradient's product or sum in a half type that is cast to float32 → one with a float32 result.

Both are summed in float32 in either case; what is left out is the rounding to the half type, the memory that it is
stored in and the kernel that casts it. So the gradients of autocast's weights and biases come out more exact than
eager's. This is for gradients alone: whatever a forward computes is rounded where eager rounds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from autodiff.extents import same
from bridge.compile.loop_ir.graph import Graph, LibraryCall, Node, Operand, Pointwise, Reduction, Value
from bridge.compile.loop_ir.views import alike, is_dense
from bridge.compile.passes.dead_code import eliminate_dead_code
from bridge.compile.schedule.limits import Rules

__all__ = ["WIDE", "widen_gradients"]

WIDE = "float32"

_NAMES = {"mm": "mm_wide"}


def widen_gradients(graph: Graph, rules: Rules, widened: Collection[str], grad_outs: int) -> Graph:
    """The graph with products and sums that nothing reads but casts to ``widened`` types, then :data:`WIDE`, made wide.

    ``grad_outs``: see :class:`~bridge.compile.options.CompileOptions`.
    """
    if not widened or not grad_outs:
        return graph
    readers = Counter(
        operand.value for node in graph.nodes for operand in node.operands if isinstance(operand, Operand)
    )
    readers.update(operand.value for operand in graph.results)
    gradients: set[Value] = set(graph.params[len(graph.params) - grad_outs :])
    nodes: list[Node] = []
    position: dict[Value, int] = {}
    for node in graph.nodes:
        if any(isinstance(operand, Operand) and operand.value in gradients for operand in node.operands):
            gradients.update(node.outs)
        read = _cast(node)
        place = None if read is None else position.get(read.value)
        if place is not None:
            is_alone = readers[read.value] == 1 and read.value in gradients
            place = place if is_alone and (read.is_whole or isinstance(nodes[place], LibraryCall)) else None
        if place is not None and node.out.dtype == WIDE:
            wide = node.out if read.is_whole else Value(node.out.name, read.value.shape, WIDE)
            nodes[place] = _wide(nodes[place], wide)
            if not read.is_whole:  # of a product with zeros behind its rows
                nodes.append(Pointwise("copy", (Operand(wide, read.view),), node.out))
            continue
        if place is not None and isinstance(nodes[place], Reduction) and node.out.dtype in widened:
            position[node.out] = place  # rounded, and perhaps cast back
        elif isinstance(node, LibraryCall) and node.outs[0].dtype in widened and _has_wide_form(node):
            position[node.outs[0]] = len(nodes)
        elif isinstance(node, Reduction) and node.out.dtype == WIDE:
            position[node.out] = len(nodes)
        nodes.append(node)
    return eliminate_dead_code(replace(graph, nodes=nodes), rules)


def _has_wide_form(node: LibraryCall) -> bool:
    """Whether the library has this product with a float32 result; one of nothing is left as it is."""
    return node.name in _NAMES and not any(same(operand.value.numel, 0) for operand in node.operands)


def _wide(node: LibraryCall | Reduction, out: Value) -> Node:
    if isinstance(node, Reduction):
        return replace(node, out=out)
    return LibraryCall(_NAMES[node.name], node.operands, (out,), node.attrs)


def _cast(node: Node) -> Operand | None:
    """What a node casts, element for element: a value as it lies, or its first rows."""
    if type(node) is not Pointwise or node.op != "astype":
        return None
    (operand,) = node.operands
    if not isinstance(operand, Operand) or not alike(operand.shape, node.out.shape):
        return None
    begins = same(operand.view.offset, 0) and is_dense(operand.view)
    return operand if begins and alike(operand.shape[1:], operand.value.shape[1:]) else None
