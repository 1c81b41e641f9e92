"""Parts apart: loops that read parts of a concatenation → they read the tensors that it would be made of.

The backward of a loop reads its states before the steps: the first one, and behind it those that the forward has
stacked, but for the last. The step that is run last reads the first one. It reads that where it lies, and all other
steps what the forward has stacked, so that nothing is put together. The same elements are read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autodiff.extents import same
from bridge.compile.loop_ir.graph import Graph, LoopCall, Node, Operand, Pointwise, Scalar, Value, whole
from bridge.compile.loop_ir.neutral import Dense, Join, Neutral
from bridge.compile.schedule.limits import Rules

__all__ = ["read_parts_apart"]


def read_parts_apart(graph: Graph, rules: Rules) -> Graph:
    """A neutral graph with such loops, where nobody else reads the concatenation; the same one if there are none."""
    most = rules.limits.parts_apart
    if not most or not any(isinstance(node, LoopCall) for node in graph.nodes):
        return graph
    readers = Counter(
        operand.value for node in graph.nodes for operand in node.operands if isinstance(operand, Operand)
    )
    made = {node.out: node for node in graph.nodes if isinstance(node, Dense | Join) and readers[node.out] == 1}
    nodes: list[Node | Neutral] = []
    for node in graph.nodes:
        nodes += _apart(node, made, most) if isinstance(node, LoopCall) else [node]
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=nodes)


def _apart(call: LoopCall, made: dict[Value, Node | Neutral], most: int) -> list[Node | Neutral]:
    """The nodes that take the place of a loop."""
    operands, before = list(call.operands), []
    apart, tensors = [], []
    for x in range(call.scan.xs):
        join = _joined(operands[call.scan.carries + x], made)
        if join is None or len(apart) == most:
            continue
        one, others = join.operands if call.scan.reverse else join.operands[::-1]
        if isinstance(others, Scalar) or not same(one.shape[0], 1):
            continue
        tensor = Value(join.out.name, one.shape, one.dtype)
        before.append(Pointwise("copy", (one,), tensor) if isinstance(one, Scalar) else Dense(one, tensor))
        operands[call.scan.carries + x] = others
        apart.append(x)
        tensors.append(whole(tensor))
    return [*before, replace(call, operands=(*operands, *tensors), apart=tuple(apart))] if apart else [call]


def _joined(operand: Operand, made: dict[Value, Node | Neutral]) -> Join | None:
    """The concatenation of two tensors, along the steps, that an operand is."""
    node = made.get(operand.value)
    while isinstance(node, Dense) and node.operand.is_whole:
        node = made.get(node.operand.value)
    return node if isinstance(node, Join) and node.axis == 0 and len(node.operands) == 2 else None
