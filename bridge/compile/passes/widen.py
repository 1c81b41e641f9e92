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
from bridge.compile.loop_ir.views import alike
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
        cast = _cast(node)
        place = position.get(cast) if readers[cast] == 1 and cast in gradients else None
        if place is not None and node.out.dtype == WIDE:
            nodes[place] = _wide(nodes[place], node.out)
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


def _cast(node: Node) -> Value | None:
    """What a node casts, element for element."""
    if type(node) is not Pointwise or node.op != "astype":
        return None
    (operand,) = node.operands
    if not isinstance(operand, Operand) or not operand.is_whole or not alike(operand.value.shape, node.out.shape):
        return None
    return operand.value
