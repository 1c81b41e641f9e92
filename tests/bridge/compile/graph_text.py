"""A loop graph as lines of text, for golden tests."""

from __future__ import annotations

from bridge.compile.loop_ir.graph import (
    Concat,
    Graph,
    LayoutAgnostic,
    LibraryCall,
    Node,
    Operand,
    Product,
    Scalar,
    Value,
)
from bridge.compile.loop_ir.views import dense


def text(graph: Graph) -> list[str]:
    """A line per node, values numbered in order: ``1 = add(p0, p1[4,8:0,1+2])``, views as shape, strides, offset."""
    numbers: dict[Value, str] = {value: value.name for value in (*graph.params, *graph.constants)}

    def read(operand: Operand | Scalar) -> str:
        if isinstance(operand, Scalar):
            return str(operand.number)
        name, view = numbers[operand.value], operand.view
        if view == dense(operand.value.shape):
            return name
        shape, strides = (",".join(map(str, each)) for each in (view.shape, view.strides))
        return f"{name}[{shape}:{strides}+{view.offset}]"

    lines = []
    for node in graph.nodes:
        reads = ", ".join(map(read, node.operands))
        name = _name(node)
        numbers.update((out, str(len(numbers) - len(graph.params))) for out in node.outs)
        lines.append(f"{numbers[node.outs[0]]} = {name}({reads})")
    return [*lines, f"return {', '.join(map(read, graph.results))}"]


def _name(node: Node | LayoutAgnostic) -> str:
    match node:
        case Concat():
            return "concat"
        case LibraryCall():
            return f"library {node.name}"
        case Product():
            *batch, m, n, k = node.plan.geometry.extents
            return f"{node.plan.way} {'x'.join(map(str, batch))} {m}x{k}x{n}"
    return type(node).__name__ if isinstance(node, LayoutAgnostic) else node.op
