"""Slices: a slice of the result of cheap arithmetic → the arithmetic on slices of its operands.

Example: ``exp(y[:, :4])`` and ``z + y[:, 4:]`` are the readers of ``y = x * s``: two products of halves, and ``y`` is
dead. Where slices are all that is read of a value, and no element twice, any arithmetic is computed on them: the gates
of an LSTM are added up in the kernel that applies their activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
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
    """Values of which point-wise nodes read slices, and nobody anything else, of no more elements than they have; and
    what such values alone are made of."""
    readers: dict[Value, list[tuple[Node, Operand]]] = defaultdict(list)
    for node in graph.nodes:
        for operand in node.operands:
            if isinstance(operand, Operand):
                readers[operand.value].append((node, operand))
    results = {operand.value for operand in graph.results}
    counts: dict[Value, int] = {}  # of elements that are read
    for node in reversed(graph.nodes):
        if type(node) is Pointwise and node.out not in results:
            count = _count(readers[node.out], counts)
            if count is not None and 0 < count <= sample_of(node.out.numel):
                counts[node.out] = count
    return set(counts)


def _count(readers: Sequence[tuple[Node, Operand]], counts: Mapping[Value, int]) -> int | None:
    """How many elements of a value are read in slices, each slice once; ``None`` if one reads it in another way."""
    found: dict[Operand | Value, int] = {}
    for node, operand in readers:
        part = _part(operand)
        if type(node) is Pointwise and part is not None:
            found[part] = sample_of(part.view.numel)
        elif type(node) is Pointwise and operand.is_whole and node.out in counts:
            found[node.out] = counts[node.out]
        else:
            return None
    return sum(found.values())


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
        producer = self._producers.arithmetic(part.value, draws=True) if of_any else self._producers.cheap(part.value)
        reads = None if producer is None else box_of_arithmetic(producer, part)
        if reads is None:
            return part
        out = Value(name, part.shape, part.dtype)
        self.add(Pointwise(producer.op, tuple(reads), out))
        return whole(out)
