"""Row values: arithmetic on a few values for each row that kernels with rows of several lengths read → once for each.

The reciprocal root of a variance is one number for each row. Where the gates of a recurrent cell read it in slices of
their rows, and a normalization in whole ones, a kernel that stores it would have to run before both; computed in each,
it costs an operator for each row. The values are the same, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autodiff.extents import sample_of
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Scalar, Value
from bridge.compile.passes.cheap import Producers
from bridge.compile.schedule.limits import Rules

__all__ = ["recompute_row_values"]


def recompute_row_values(graph: Graph, rules: Rules) -> Graph:
    """The graph in which kernels of several sizes that read small values each compute them from what is in memory."""
    if not rules.limits.section_elements:
        return graph
    copies = _Copies(graph, rules)
    for node in graph.nodes:
        copies.add(node)
    return replace(graph, nodes=copies.nodes)


class _Copies:
    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.nodes: list[Node] = []
        self._free_reads = rules.limits.free_reads
        self._producers = Producers(rules.limits)
        self._made: dict[tuple[Value, int], Value] = {}
        self._sizes: dict[Value, set[int]] = defaultdict(set)
        for node in graph.nodes:
            for operand in node.operands:
                if isinstance(operand, Operand) and self._is_small(operand, node):
                    self._sizes[operand.value].add(sample_of(node.out.numel))

    def _is_small(self, operand: Operand, node: Node) -> bool:
        """Whether a point-wise node reads a value that is small beside what it makes."""
        if type(node) is not Pointwise or operand.value.source != "node":
            return False
        return self._free_reads * sample_of(operand.value.numel) <= sample_of(node.out.numel)

    def add(self, node: Node) -> None:
        if type(node) is Pointwise:
            read = tuple(self._read(operand, node) for operand in node.operands)
            node = node if read == node.operands else replace(node, operands=read)
        self.nodes.append(node)
        self._producers.add(node)

    def _read(self, operand: Operand | Scalar, node: Pointwise) -> Operand | Scalar:
        if isinstance(operand, Scalar) or not self._is_small(operand, node) or len(self._sizes[operand.value]) < 2:
            return operand
        value = self._copy(operand.value, sample_of(node.out.numel))
        return operand if value is None else Operand(value, operand.view)

    def _copy(self, value: Value, size: int) -> Value | None:
        """The value, computed once more for readers of a size; ``None`` if it is not made of values in memory."""
        if (value, size) not in self._made:
            producer = self._producers.arithmetic(value)
            if producer is None or producer.out.dtype == "bool":
                return None
            read = tuple(self._operand(operand, value, size) for operand in producer.operands)
            if None in read:
                return None
            made = self._made[value, size] = Value(value.name, value.shape, value.dtype)
            self.nodes.append(Pointwise(producer.op, read, made))
        return self._made[value, size]

    def _operand(self, operand: Operand | Scalar, value: Value, size: int) -> Operand | Scalar | None:
        if isinstance(operand, Scalar) or not self._producers.is_of_a_kernel(operand.value):
            return operand
        if sample_of(operand.value.numel) > sample_of(value.numel):
            return None
        copied = self._copy(operand.value, size)
        return None if copied is None else Operand(copied, operand.view)
