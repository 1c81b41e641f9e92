"""Padded products: a large product of misaligned rows → a part of a product of matrices padded with zeros.

A GPU's library has full-speed kernels for matrices whose extents along memory are multiples of 16 bytes, and slow ones
for others: with a vocabulary of 30522 words a language model's head takes up to three times as long (an H200, bfloat16
and TF32). The zeros add zeros to a sum, and the extra rows and columns have no consumer. The producer of a matrix
writes it padded where it can (:class:`~bridge.compile.loop_ir.graph.Pad`), once; consumers of the result read a part of
a wider one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autodiff.extents import Dim, same, same_shape, sample_of
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import (
    Graph,
    LayoutAgnostic,
    MatMul,
    Node,
    Operand,
    Pad,
    Shaped,
    Value,
    is_turned,
    whole,
)
from bridge.compile.schedule.products import LayoutClass, ProductShape

__all__ = ["pad_products"]


def pad_products(graph: Graph, unit: Callable[[ProductShape], int]) -> Graph:
    """Pads matrix products of a layout-agnostic graph; returns the same graph if none needs it.

    Args:
        unit: a product's class at the sample's sizes → the unit of which extents along memory should be multiples; 1:
            no preference.
    """
    walk = _Walk(graph, unit)
    for node in graph.nodes:
        walk.add(node)
    return graph if len(walk.nodes) == len(graph.nodes) else replace(graph, nodes=walk.nodes)


class _Walk:
    def __init__(self, graph: Graph, unit: Callable[[ProductShape], int]) -> None:
        self.nodes: list[Node | LayoutAgnostic] = []
        self._unit = unit
        self._turned = {node.out: node.operand for node in graph.nodes if isinstance(node, Shaped) and is_turned(node)}
        self._padded: dict[tuple[Value, tuple[Dim, ...]], Operand] = {}

    def add(self, node: Node | LayoutAgnostic) -> None:
        wide = self._wide(node) if isinstance(node, MatMul) else None
        if wide is None:
            self.nodes.append(node)
            return
        m, k, n = wide
        a, b = self._matrix(node.a, (m, k)), self._matrix(node.b, (k, n))
        bias = None if node.bias is None else self._row(node.bias, n)
        out = Value(node.out.name, (m, n), node.out.dtype)
        self.nodes.append(MatMul(a, b, out, bias))
        parts = [(axis, extent) for axis, extent in enumerate(node.out.shape) if not same(extent, out.shape[axis])]
        made = whole(out)
        if not parts:  # the inner axis alone is padded
            self.nodes[-1] = replace(self.nodes[-1], out=node.out)
        for place, (axis, extent) in enumerate(parts, start=1):
            extents = tuple(extent if index == axis else each for index, each in enumerate(made.shape))
            part = node.out if place == len(parts) else Value(node.out.name, extents, node.out.dtype)
            self.nodes.append(Shaped(views.slice_view, (axis, 0, extent, 1), made, part))
            made = whole(part)

    def _wide(self, node: MatMul) -> tuple[Dim, Dim, Dim] | None:
        """The padded extents ``(m, k, n)`` of a product; ``None``: not padded."""
        if len(node.a.shape) != 2 or len(node.b.shape) != 2 or not (node.a.is_whole and node.b.is_whole):
            return None
        (m, k), n = node.a.shape, node.b.shape[1]
        columns = [node.a.value in self._turned, node.b.value in self._turned]
        a, b = (LayoutClass("column" if each else "row") for each in columns)
        unit = self._unit(ProductShape(node.out.dtype, 1, *map(sample_of, (m, n, k)), a, b))
        extents = {"m": m, "k": k, "n": n}
        along_memory = {"m" if columns[0] else "k", "k" if columns[1] else "n", "n"}
        known = [extents[name] for name in along_memory]
        if not all(isinstance(extent, int) for extent in known) or not any(extent % unit for extent in known):
            return None
        return tuple(-(-each // unit) * unit if name in along_memory else each for name, each in extents.items())

    def _matrix(self, operand: Operand, extents: tuple[Dim, Dim]) -> Operand:
        """The padded matrix; for the transpose of a row-major matrix, the transpose of its padded source."""
        if operand.value not in self._turned:
            return self._with_zeros(operand, extents)
        source = self._with_zeros(self._turned[operand.value], extents[::-1])
        if source is self._turned[operand.value]:
            return operand
        out = Value(operand.value.name, extents, operand.dtype)
        self.nodes.append(Shaped(views.permute, ((1, 0),), source, out))
        return whole(out)

    def _row(self, bias: Operand, columns: Dim) -> Operand:
        """A vector with zeros appended."""
        (count,) = bias.shape
        if count == columns:
            return bias
        matrix, vector = (Value(bias.value.name, extents, bias.dtype) for extents in ((1, count), (columns,)))
        self.nodes.append(Shaped(views.reshape, ((1, count),), bias, matrix))
        padded = self._with_zeros(whole(matrix), (1, columns))
        self.nodes.append(Shaped(views.reshape, ((columns,),), padded, vector))
        return whole(vector)

    def _with_zeros(self, operand: Operand, extents: tuple[Dim, Dim]) -> Operand:
        if same_shape(operand.shape, extents):
            return operand
        key = operand.value, extents
        if key not in self._padded:
            out = Value(operand.value.name, extents, operand.dtype)
            self.nodes.append(Pad("pad", (operand,), out))
            self._padded[key] = whole(out)
        return self._padded[key]
