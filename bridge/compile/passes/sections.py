"""Sections: operands of a concatenation that cheap arithmetic made → the arithmetic inside their section.

The gates of an LSTM's gradient, the halves of a rotary embedding: each is computed where the concatenation puts it, and
never stored by itself. A small concatenation, for which a launch takes longer than all its arithmetic, is computed from
what other than point-wise nodes have made, whatever that takes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autodiff.extents import same, sample_of
from bridge.compile.loop_ir.graph import Concat, Graph, Node, Operand, Pointwise, Scalar, Value, whole
from bridge.compile.loop_ir.views import View
from bridge.compile.passes.cheap import Producers, box_of_arithmetic
from bridge.compile.schedule.limits import Rules

__all__ = ["recompute_sections"]


def recompute_sections(graph: Graph, rules: Rules) -> Graph:
    """The graph with concatenations of what they are made of by a few operators of cheap arithmetic each."""
    producers, nodes = Producers(rules.limits), []
    for node in graph.nodes:
        if isinstance(node, Concat):
            sections = _Small(node, producers)
            is_small = sample_of(node.out.numel) <= rules.limits.section_elements
            computed = sections.all_computed(rules.limits.nodes // 2) if is_small else None
            if computed is None:
                sections = _Sections(node, producers)
                depth = rules.limits.section_operators
                computed = tuple(sections.computed(operand, depth) for operand in node.operands)
            nodes += sections.nodes
            node = replace(node, operands=computed)
        nodes.append(node)
        producers.add(node)
    return replace(graph, nodes=nodes)


class _Sections:
    """The operands of one concatenation; they are constant along the axis of the sections."""

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
        """The operand, or the result of what made it, computed for all sections alike."""
        producer = self._producers.cheap(operand.value) if depth and isinstance(operand, Operand) else None
        reads = None if producer is None else box_of_arithmetic(producer, self._one(operand))
        if reads is None:
            return operand
        placed = tuple(self.computed(self._in_all(read), depth - 1) for read in reads)
        out = Value(self._name, self._spread, operand.dtype)
        self.nodes.append(Pointwise(producer.op, placed, out))
        return whole(out)

    def _one(self, operand: Operand) -> Operand:
        """The operand in one section."""
        view, axis = operand.view, self._axis
        shape, strides = ((*each[:axis], *each[axis + 1 :]) for each in (view.shape, view.strides))
        return Operand(operand.value, View(shape, strides, view.offset))

    def _in_all(self, read: Operand | Scalar) -> Operand | Scalar:
        """The same elements in every section."""
        if isinstance(read, Scalar):
            return Scalar(read.number, read.dtype, self._spread)
        strides = read.view.strides
        strides = (*strides[: self._axis], 0, *strides[self._axis :])
        return Operand(read.value, View(self._spread, strides, read.view.offset))


class _Small(_Sections):
    """A concatenation whose operands are computed by arithmetic alone; no value twice."""

    def __init__(self, concat: Concat, producers: Producers) -> None:
        super().__init__(concat, producers)
        self._operands = concat.operands
        self._known: dict[Operand, Operand] = {}
        self._reads_kernels = False

    def all_computed(self, most: int) -> tuple[Operand | Scalar, ...] | None:
        """The operands from at most so many operators; ``None`` if it takes more, or the results of a kernel."""
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
