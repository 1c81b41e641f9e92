"""Slices: a slice of the result of cheap arithmetic → the arithmetic on slices of its operands.

Example: ``exp(y[:, :4])`` and ``z + y[:, 4:]`` are the readers of ``y = x * s``: two products of halves, and ``y`` is
dead. Where slices are all that is read of a value, and no element twice, any arithmetic is computed on them: the gates
of an LSTM are added up in the kernel that applies their activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from autodiff.extents import same, sample_of
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Scalar, Value, whole
from bridge.compile.passes.cheap import Producers, box_of_arithmetic
from bridge.compile.schedule.limits import Rules

__all__ = ["recompute_slices"]


def recompute_slices(graph: Graph, rules: Rules) -> Graph:
    """The graph with every slice of cheap arithmetic that point-wise nodes read computed by a node of its own, once."""
    slices = _Slices(rules, _sliced(graph))
    for node in graph.nodes:
        slices.add(node)
    return replace(graph, nodes=slices.nodes)


def _sliced(graph: Graph) -> set[Value]:
    """Values of which point-wise nodes read slices, and nobody anything else, of no more elements than they have."""
    parts: dict[Value, set[Operand]] = defaultdict(set)
    others = {operand.value for operand in graph.results}
    for node in graph.nodes:
        for operand in node.operands:
            part = _part(operand) if isinstance(operand, Operand) else None
            if part is not None and type(node) is Pointwise:
                parts[part.value].add(part)
            elif isinstance(operand, Operand):
                others.add(operand.value)
    return {
        value
        for value, found in parts.items()
        if value not in others and sum(sample_of(part.view.numel) for part in found) <= sample_of(value.numel)
    }


def _part(operand: Operand) -> Operand | None:
    """What is read of a value, each element once; ``None`` if that is all of it, or no slice."""
    view = views.without_broadcast(operand.view, len(operand.value.shape))
    # A few elements for each row or column would be a kernel of their own.
    if view is None or not same(operand.view.numel, view.numel):
        return None
    return Operand(operand.value, view) if sample_of(view.numel) < sample_of(operand.value.numel) else None


class _Slices:
    def __init__(self, rules: Rules, sliced: Collection[Value]) -> None:
        self.nodes: list[Node] = []
        self._sliced = sliced
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
        part = _part(operand)
        if part is None:
            return operand
        if part not in self._known:
            self._known[part] = self._computed(part, name)
        found = self._known[part]
        return operand if found is part else Operand(found.value, views.expand(found.view, operand.shape))

    def _computed(self, part: Operand, name: str) -> Operand:
        of_any = part.value in self._sliced
        producer = self._producers.arithmetic(part.value) if of_any else self._producers.cheap(part.value)
        reads = None if producer is None else box_of_arithmetic(producer, part)
        if reads is None:
            return part
        out = Value(name, part.shape, part.dtype)
        self.add(Pointwise(producer.op, tuple(reads), out))
        return whole(out)
