"""Chains: two batched products with row operations between them, as attention's → one kernel; each as its own graph.

Chains are found before layouts are chosen, because both products must be generated code
(:mod:`bridge.compile.schedule.chain_plan`). An A/B timing decides whether a chain beats its three steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from autodiff.ir import itemsize
from bridge.compile.loop_ir.graph import (
    Graph,
    LayoutAgnostic,
    MatMul,
    Node,
    Operand,
    Pointwise,
    Reduction,
    Result,
    Scalar,
    Shaped,
    Value,
    whole,
)

__all__ = ["Chain", "chains_in"]

_SMALLEST = 2**17
"""The least number of scores: fewer stay in a core's cache between one kernel and the next."""

_DEEPEST = 256
"""The maximum inner extent of the first product: one chunk of its sums."""

_STACK = 3 * 2**19
"""Maximum bytes of a task's stack memory: both packed operands, and some rows of the scores."""

_ROWS, _COLUMNS = 32, 64
"""Upper bounds of twice a register tile's rows (of scores and of results), and of its columns."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Two products: only the nodes between read the first one's result, and only the second product reads theirs.

    Attributes:
        nodes: of the graph, in order: the views that the products read, both products, the nodes between them, and the
            views through which others read the result.
    """

    first: MatMul
    second: MatMul
    nodes: tuple[Node | LayoutAgnostic, ...]

    @property
    def text(self) -> str:
        """The chain's shapes, types and operators as text: the key of its timing."""
        names: dict[Value, str] = {}

        def told(operand: Operand | Scalar) -> str:
            if isinstance(operand, Scalar):
                return f"{operand.number!r} {operand.shape}"
            value = operand.value
            name = names.setdefault(value, f"v{len(names)} {value.dtype} {value.shape}")
            return f"{name} by {operand.view.shape} {operand.view.strides} {operand.view.offset}"

        lines = []
        for node in self.nodes:
            op = getattr(node, "op", type(node).__name__)
            how = f"{node.function.__name__} {node.arguments}" if isinstance(node, Shaped) else ""
            lines.append(f"{told(whole(node.out))} = {op} {how}({', '.join(map(told, node.operands))})")
        return "; ".join(lines)

    def graph(self, constants: dict[Value, object]) -> tuple[Graph, frozenset[MatMul]]:
        """The chain as a graph of its own, with its inputs as parameters; and its products there."""
        moved: dict[Value, Value] = {}
        params, used = [], {}

        def there(operand: Operand | Scalar) -> Operand | Scalar:
            if isinstance(operand, Scalar):
                return operand
            value = operand.value
            if value in constants:
                used[value] = constants[value]
                return operand
            if value not in moved:
                moved[value] = Value(value.name, value.shape, value.dtype, "param")
                params.append(moved[value])
            return Operand(moved[value], operand.view)

        nodes: list[Node | LayoutAgnostic] = []
        for node in self.nodes:
            operands = tuple(map(there, node.operands))
            out = moved[node.out] = Value(node.out.name, node.out.shape, node.out.dtype)
            match node:
                case MatMul():
                    nodes.append(MatMul(*operands[:2], out))
                case Pointwise():
                    nodes.append(replace(node, operands=operands, out=out))
                case _:
                    nodes.append(replace(node, operand=operands[0], out=out))
        products = frozenset(node for node in nodes if isinstance(node, MatMul))
        read = {operand.value for node in nodes for operand in node.operands if isinstance(operand, Operand)}
        for out in [node.out for node in nodes if node.out not in read]:
            nodes.append(Result(whole(out), Value(out.name, out.shape, out.dtype)))
        return Graph(params, used, nodes, []), products


def chains_in(graph: Graph) -> Iterator[Chain]:
    """The chains of a layout-agnostic graph, of static sizes, for which keeping the scores in a cache may pay."""
    makers = {out: node for node in graph.nodes for out in node.outs}
    for place, node in enumerate(graph.nodes):
        if isinstance(node, MatMul) and _may_begin(node):
            found = _behind(graph, place)
            if found is not None:
                yield _with_views(graph, node, *found, makers)


def _may_begin(node: MatMul) -> bool:
    """Whether a product's sizes and types fit a chain's first product."""
    shapes = node.a.shape, node.b.shape, node.out.shape
    if node.bias is not None or len(node.out.shape) < 3 or node.out.dtype not in ("float32", "float64"):
        return False
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        return False
    batch = node.out.shape[:-2]
    alike = node.a.shape[:-2] == batch == node.b.shape[:-2] and len({node.a.dtype, node.b.dtype, node.out.dtype}) == 1
    return alike and math.prod(node.out.shape) >= _SMALLEST and 0 < node.a.shape[-1] <= _DEEPEST


def _may_end(first: MatMul, node: MatMul) -> bool:
    """Whether a product of a chain's scores fits as its second product."""
    k, n, columns = first.a.shape[-1], first.out.shape[-1], node.out.shape[-1]
    batch = node.out.shape[:-2]
    if node.bias is not None or node.b.shape != (*batch, n, columns) or node.a.shape[:-2] != batch or columns == 0:
        return False
    kept = _whole(n) * (k + _ROWS) + n * _whole(columns)
    return node.out.dtype == first.out.dtype == node.b.dtype and kept * itemsize(node.out.dtype) <= _STACK


def _whole(columns: int) -> int:
    return -(-columns // _COLUMNS) * _COLUMNS


def _behind(graph: Graph, place: int) -> tuple[list[Node | LayoutAgnostic], MatMul] | None:
    """The nodes between the product at ``place`` and the only product that consumes its result, and that product.

    ``None``: there is none, or another consumer."""
    first, second = graph.nodes[place], None
    inside, between = {first.out}, []
    for node in graph.nodes[place + 1 :]:
        if not _reads(node, inside):
            continue
        if isinstance(node, MatMul):
            if second is not None or _reads_operand(node.b, inside) or not _may_end(first, node):
                return None
            second = node
        elif isinstance(node, Pointwise | Shaped) or (isinstance(node, Reduction) and node.inner == 1):
            between.append(node)
            inside.add(node.out)
        else:
            return None
    if second is None or any(operand.value in inside for operand in graph.results):
        return None
    return between, second


def _reads(node: Node | LayoutAgnostic, values: Collection[Value]) -> bool:
    return any(_reads_operand(operand, values) for operand in node.operands)


def _reads_operand(operand: Operand | Scalar, values: Collection[Value]) -> bool:
    return isinstance(operand, Operand) and operand.value in values


def _with_views(
    graph: Graph,
    first: MatMul,
    between: list[Node | LayoutAgnostic],
    second: MatMul,
    makers: dict[Value, Node | LayoutAgnostic],
) -> Chain:
    """The chain with the views before and after it."""
    wanted = {first, second, *between}
    todo = [operand for node in (first, second, *between) for operand in node.operands]
    while todo:
        operand = todo.pop()
        maker = makers.get(operand.value) if isinstance(operand, Operand) else None
        if isinstance(maker, Shaped) and maker not in wanted:
            wanted.add(maker)
            todo += maker.operands
    behind = {second.out}
    for node in graph.nodes:
        if isinstance(node, Shaped) and _reads(node, behind):
            wanted.add(node)
            behind.add(node.out)
    return Chain(first, second, tuple(node for node in graph.nodes if node in wanted))
