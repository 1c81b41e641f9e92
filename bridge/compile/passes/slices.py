"""Slices: a slice of the result of cheap arithmetic → the arithmetic on slices of its operands.

Example: ``exp(y[:, :4])`` and ``z + y[:, 4:]`` are the readers of ``y = x * s``: two products of halves, and ``y`` is
dead.
"""

from __future__ import annotations

from dataclasses import replace

from autodiff.extents import same, sample_of
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Scalar, Value, whole
from bridge.compile.passes.cheap import Producers, box_of_arithmetic
from bridge.compile.schedule.limits import Rules

__all__ = ["recompute_slices"]


def recompute_slices(graph: Graph, rules: Rules) -> Graph:
    """The graph with every slice of cheap arithmetic that point-wise nodes read computed by a node of its own, once."""
    slices = _Slices(rules)
    for node in graph.nodes:
        slices.add(node)
    return replace(graph, nodes=slices.nodes)


class _Slices:
    def __init__(self, rules: Rules) -> None:
        self.nodes: list[Node] = []
        self._producers = Producers(rules.limits)
        self._known: dict[Operand, Operand] = {}

    def add(self, node: Node) -> None:
        if type(node) is Pointwise:
            reads = tuple(self._read(operand, node.out.name) for operand in node.operands)
            node = node if reads == node.operands else replace(node, operands=reads)
        self.nodes.append(node)
        self._producers.add(node)

    def _read(self, operand: Operand | Scalar, name: str) -> Operand | Scalar:
        """The operand, or the same elements from a node that computes no others."""
        if isinstance(operand, Scalar):
            return operand
        view = views.without_broadcast(operand.view, len(operand.value.shape))
        # A few elements for each row or column would be a kernel of their own.
        if view is None or not same(operand.view.numel, view.numel):
            return operand
        if sample_of(view.numel) >= sample_of(operand.value.numel):
            return operand
        part = Operand(operand.value, view)
        if part not in self._known:
            self._known[part] = self._computed(part, name)
        found = self._known[part]
        return operand if found is part else Operand(found.value, views.expand(found.view, operand.shape))

    def _computed(self, part: Operand, name: str) -> Operand:
        producer = self._producers.cheap(part.value)
        reads = None if producer is None else box_of_arithmetic(producer, part)
        if reads is None:
            return part
        out = Value(name, part.shape, part.dtype)
        self.add(Pointwise(producer.op, tuple(reads), out))
        return whole(out)
