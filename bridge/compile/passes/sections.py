"""Sections: slices, concatenations and values that are made in parts → reads of a larger buffer in place.

Sections: operands of a concatenation made by cheap arithmetic → the arithmetic inside their section. Each gate of an
LSTM's gradient, or half of a rotary embedding, is computed where the concatenation puts it, and never stored by itself.
A small concatenation, whose launch takes longer than its arithmetic, recomputes all point-wise producers.

Slices: a slice of the result of cheap arithmetic → the arithmetic on slices of its operands. Example: ``exp(y[:, :4])``
and ``z + y[:, 4:]`` read ``y = x * s``: two products of halves, and ``y`` is dead. If only slices of a value are read,
and no element twice, any arithmetic is: the kernel that applies an LSTM's activations adds up its gates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from autodiff.extents import Dim, same, sample_of
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import (
    Concat,
    Graph,
    Node,
    Operand,
    Pointwise,
    Scalar,
    Value,
    whole,
)
from bridge.compile.loop_ir.views import View
from bridge.compile.passes.cheap import Producers, Recomputation, box_of_arithmetic
from bridge.compile.schedule.limits import Rules

__all__ = ["Placed", "recompute_sections", "recompute_slices"]


def recompute_sections(graph: Graph, rules: Rules) -> Graph:
    """Recomputes cheap operands of concatenations, a few operators deep, inside their sections."""
    producers, nodes = Producers(rules.limits), []
    for node in graph.nodes:
        if isinstance(node, Concat):
            sections = _Small(node, producers)
            is_small = sample_of(node.out.numel) <= rules.limits.concats.section_elements
            computed = sections.all_computed(rules.limits.kernel.nodes // 2) if is_small else None
            if computed is None:
                sections = _Sections(node, producers)
                depth = rules.limits.concats.section_operators
                computed = tuple(sections.computed(operand, depth) for operand in node.operands)
            nodes += sections.nodes
            node = replace(node, operands=computed)
        nodes.append(node)
        producers.add(node)
    return replace(graph, nodes=nodes)


class _Sections:
    """Recomputes the operands of one concatenation; operands are constant along the sections' axis."""

    def __init__(self, concat: Concat, producers: Producers) -> None:
        self.nodes: list[Node] = []
        self._name = concat.out.name
        self._producers = producers
        self._spread = concat.operands[0].shape
        self._axis = next(
            axis
            for axis, extent in enumerate(self._spread)
            if same(extent, len(concat.operands)) and same(math.prod(self._spread[axis + 1 :]), concat.inner)
        )

    def computed(self, operand: Operand | Scalar, depth: int) -> Operand | Scalar:
        """The operand, or its cheap producer recomputed up to ``depth`` operators deep, for all sections alike."""
        producer = self._producers.cheap(operand.value) if depth and isinstance(operand, Operand) else None
        reads = None if producer is None else box_of_arithmetic(producer, self._one(operand))
        if reads is None:
            return operand
        placed = tuple(self.computed(self._in_all(read), depth - 1) for read in reads)
        out = Value(self._name, self._spread, operand.dtype)
        self.nodes.append(Pointwise(producer.op, placed, out))
        return whole(out)

    def _one(self, operand: Operand) -> Operand:
        """The operand without the sections' axis."""
        view, axis = operand.view, self._axis
        shape, strides = ((*each[:axis], *each[axis + 1 :]) for each in (view.shape, view.strides))
        return Operand(operand.value, View(shape, strides, view.offset))

    def _in_all(self, read: Operand | Scalar) -> Operand | Scalar:
        """The operand with the sections' axis, constant along it."""
        if isinstance(read, Scalar):
            return Scalar(read.number, read.dtype, self._spread)
        strides = read.view.strides
        strides = (*strides[: self._axis], 0, *strides[self._axis :])
        return Operand(read.value, View(self._spread, strides, read.view.offset))


class _Small(_Sections):
    """Recomputes all operands of a concatenation from arithmetic alone, each value once."""

    def __init__(self, concat: Concat, producers: Producers) -> None:
        super().__init__(concat, producers)
        self._operands = concat.operands
        self._known: dict[Operand, Operand] = {}
        self._reads_kernels = False

    def all_computed(self, most: int) -> tuple[Operand | Scalar, ...] | None:
        """The operands in at most ``most`` operators; ``None`` if more are needed, or a kernel's results are read."""
        computed = tuple(self.computed(operand, most) for operand in self._operands)
        return None if self._reads_kernels or not 0 < len(self.nodes) <= most else computed

    def computed(self, operand: Operand | Scalar, depth: int) -> Operand | Scalar:
        if isinstance(operand, Scalar) or self._reads_kernels:
            return operand
        if operand not in self._known:
            producer = self._producers.arithmetic(operand.value)
            reads = None if producer is None else box_of_arithmetic(producer, self._one(operand))
            self._reads_kernels |= len(self.nodes) > depth or (
                reads is None and self._producers.is_of_a_kernel(operand.value)
            )
            self._known[operand] = operand if reads is None else self._made(producer, operand, reads, depth)
        return self._known[operand]

    def _made(self, producer: Pointwise, operand: Operand, reads: list[Operand | Scalar], depth: int) -> Operand:
        placed = tuple(self.computed(self._in_all(read), depth) for read in reads)
        out = Value(self._name, self._spread, operand.dtype)
        self.nodes.append(Pointwise(producer.op, placed, out))
        return whole(out)


def recompute_slices(graph: Graph, rules: Rules) -> Graph:
    """Computes each slice of cheap arithmetic that point-wise nodes read by a node of its own, once."""
    return _Slices(rules, _sliced(graph)).of(graph)


def _sliced(graph: Graph) -> set[Value]:
    """Values of which only slices are read, by point-wise nodes and each element at most once on average; transitively
    also values whose only consumers are sliced values."""
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
    """The number of elements read in slices, each slice once; ``None`` if there is another kind of consumer."""
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
    """The elements of a value that an operand reads, each once; ``None`` if it reads all, or no slice."""
    view = views.without_broadcast(operand.view, len(operand.value.shape))
    # A slice that is broadcast would need a kernel of its own.
    if view is None or not same(operand.view.numel, view.numel):
        return None
    return Operand(operand.value, view) if sample_of(view.numel) < sample_of(operand.value.numel) else None


class _Slices(Recomputation):
    def __init__(self, rules: Rules, sliced: Collection[Value]) -> None:
        super().__init__(rules)
        self._sliced = sliced
        self._known: dict[Operand, Operand] = {}

    def read(self, operand: Operand, reader: Pointwise) -> Operand:
        """The operand, or its elements from a node that computes only them."""
        part = _part(operand)
        if part is None:
            return operand
        if part not in self._known:
            self._known[part] = self._computed(part, reader.out.name)
        found = self._known[part]
        return operand if found is part else Operand(found.value, views.expand(found.view, operand.shape))

    def _computed(self, part: Operand, name: str) -> Operand:
        of_any = part.value in self._sliced
        producer = self.producers.arithmetic(part.value, draws=True) if of_any else self.producers.cheap(part.value)
        reads = None if producer is None else box_of_arithmetic(producer, part)
        if reads is None:
            return part
        out = Value(name, part.shape, part.dtype)
        self.add(Pointwise(producer.op, tuple(reads), out))
        return whole(out)


class Placed:
    """The nodes of a graph under construction; makes equal copies once.

    Attributes:
        nodes: in order.
        name: the name of new values.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.name = "t"
        self._copies: dict[Hashable, Operand] = {}

    def fresh(self, extents: Sequence[Dim], element_type: str) -> Value:
        """A new value, for a node's result."""
        return Value(self.name, tuple(extents), element_type)

    def pointwise_copy(self, operand: Operand | Scalar) -> Operand:
        """A contiguous copy of the operand that nothing else shares."""
        return self._add_copy(operand, self.fresh(operand.shape, operand.dtype))

    def copy(self, operand: Operand | Scalar, out: Value | None = None) -> Operand:
        """A contiguous copy of the operand, made once; ``out``: the value for a new copy."""
        key = (operand, str(operand.number)) if isinstance(operand, Scalar) else operand  # 0.0 equals -0.0
        if key not in self._copies:
            self._copies[key] = self._add_copy(operand, out or self.fresh(operand.shape, operand.dtype))
        return self._copies[key]

    def copied(self, operand: Operand | Scalar) -> Operand | None:
        """An existing contiguous copy of an operand, or ``None``."""
        return self._copies.get(operand) if isinstance(operand, Operand) else None

    def _add_copy(self, operand: Operand | Scalar, out: Value) -> Operand:
        self.nodes.append(Pointwise("copy", (operand,), out))
        return whole(out)

    def dense(self, operand: Operand | Scalar) -> Operand:
        """The operand if it is a whole value in memory order; otherwise a copy."""
        return operand if is_all_of_a_value(operand) else self.copy(operand)

    def expand(self, operand: Operand, extents: Sequence[Dim]) -> Operand:
        return Operand(operand.value, views.expand(operand.view, extents))

    def reshape(self, operand: Operand, extents: Sequence[Dim]) -> Operand:
        view = views.reshape(operand.view, extents)
        if view is not None:
            return Operand(operand.value, view)
        return Operand(self.copy(operand).value, views.dense(extents))


def is_all_of_a_value(operand: Operand | Scalar) -> bool:
    """Whether the operand reads all elements of a value in memory order."""
    return isinstance(operand, Operand) and operand.is_whole
