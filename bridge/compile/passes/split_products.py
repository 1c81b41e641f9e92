"""Split products: a product of few rows → a batch of products of parts of its inner axis, added up.

Such a product is too small to fill a GPU, and what comes next waits for it. cuBLAS splits the inner axis itself, and
adds the parts up in a kernel of its own; here who reads the product adds them up. A sum's order changes, by rounding;
parts of a half type are float32, and their sum is rounded once, as in one product.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autodiff.ir import itemsize
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Value, whole
from bridge.compile.loop_ir.neutral import MatMul, Neutral, Result, Shaped, is_turned
from bridge.compile.schedule.products import LayoutClass, ProductShape

__all__ = ["split_products"]


def split_products(graph: Graph, parts: Callable[[ProductShape], int], is_step: bool = False) -> Graph:
    """A neutral graph with its products in so many parts as ``parts`` says; the same one if that is one.

    Args:
        is_step: of a loop, whose products are split where a kernel that reads one can make the sum. Elsewhere the shape
            alone decides: a backward may compute a product again, and the numbers are to be the same.
    """
    readers: defaultdict[Value, list[Node | Neutral]] = defaultdict(list)
    for node in graph.nodes:
        for operand in node.operands:
            if isinstance(operand, Operand):
                readers[operand.value].append(node)
    turned = {node.out for node in graph.nodes if isinstance(node, Shaped) and is_turned(node)}
    nodes: list[Node | Neutral] = []
    for node in graph.nodes:
        count = _count(node, parts, turned) if isinstance(node, MatMul) and node.bias is None else 1
        if count == 1 or (is_step and not _is_added_up_by_readers(readers[node.out])):
            nodes.append(node)
        else:
            nodes += _split(node, count)
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=nodes)


def _is_added_up_by_readers(readers: Sequence[Node | Neutral]) -> bool:
    """Whether a kernel that reads the product can make the sum; it stores that where it is a result, too."""
    return not (any(isinstance(each, MatMul) for each in readers) or all(isinstance(each, Result) for each in readers))


def _count(node: MatMul, parts: Callable[[ProductShape], int], turned: Collection[Value]) -> int:
    extents = (*node.a.shape, *node.b.shape)
    if len(node.a.shape) < 2 or len(node.b.shape) != 2 or not all(isinstance(extent, int) for extent in extents):
        return 1
    (*rows, k), n = node.a.shape, node.b.shape[1]
    b = LayoutClass("column" if node.b.value in turned else "row")
    return parts(ProductShape(node.out.dtype, 1, math.prod(rows), n, k, b=b))


def _split(node: MatMul, count: int) -> list[Node | Neutral]:
    (*rows, k), n, dtype = node.a.shape, node.b.shape[1], node.out.dtype
    m, inner = math.prod(rows), k // count
    nodes: list[Node | Neutral] = []

    wide = "float32" if itemsize(dtype) == 2 else dtype

    def value(extents: tuple[int, ...]) -> Value:
        return Value(node.out.name, extents, wide)

    def shaped(function: Callable, arguments: tuple, operand: Operand, extents: tuple[int, ...]) -> Operand:
        out = Value(node.out.name, extents, operand.dtype)
        nodes.append(Shaped(function, arguments, operand, out))
        return whole(out)

    a = shaped(views.reshape, ((m, count, inner),), node.a, (m, count, inner))
    a = shaped(views.permute, ((1, 0, 2),), a, (count, m, inner))
    b = shaped(views.reshape, ((count, inner, n),), node.b, (count, inner, n))
    products = value((count, m, n))
    nodes.append(MatMul(a, b, products))
    total = None
    for part in range(count):
        each = shaped(views.slice_view, (0, part, part + 1, 1), whole(products), (1, m, n))
        each = shaped(views.reshape, (node.out.shape,), each, node.out.shape)
        if total is None:
            total = each
            continue
        out = node.out if part == count - 1 and wide == dtype else value(node.out.shape)
        nodes.append(Pointwise("add", (total, each), out))
        total = whole(out)
    if wide != dtype:
        nodes.append(Pointwise("astype", (total,), node.out))
    return nodes
