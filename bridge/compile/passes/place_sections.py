"""Sections in place: a concatenation of what kernels compute, for readers in memory → stored by who computes it.

The gradients of an LSTM's gates, of query, key and value: a product reads them side by side. The kernel that computes
them stores each in its section, and there is no pass over memory that puts them together. The same elements, as they
are rounded in any case. Where a kernel reads the concatenation, its own sections stay: it needs no memory at all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autodiff.extents import same
from bridge.compile.loop_ir.graph import Concat, Graph, Operand, Pointwise, Reduction, Scalar, Sections, Value, whole
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.limits import Rules

__all__ = ["place_sections"]


def place_sections(graph: Graph, rules: Rules) -> Graph:
    """The graph with such concatenations, of few sections, in the place of nodes that read their operands."""
    made = {node.out for node in graph.nodes if type(node) is Pointwise}
    by_kernels = {
        operand.value
        for node in graph.nodes
        for operand in node.operands
        if isinstance(node, Pointwise | Reduction) and isinstance(operand, Operand)
    }
    most, nodes = rules.limits.placed_sections, []
    for node in graph.nodes:
        if isinstance(node, Concat) and len(node.operands) <= most and node.out not in by_kernels:
            node = _placed(node, made) or node
        nodes.append(node)
    return replace(graph, nodes=nodes)


def _placed(node: Concat, made: Collection[Value]) -> Sections | None:
    """``None`` unless each section is all of a value that a kernel makes."""
    values = []
    for operand in node.operands:
        if isinstance(operand, Scalar) or operand.value not in made or not _is_all(operand, node):
            return None
        values.append(operand.value)
    return Sections(tuple(map(whole, values)), node.out, node.inner)


def _is_all(operand: Operand, node: Concat) -> bool:
    """Whether a section reads all elements of a value in order."""
    view, sections = operand.view, len(node.operands)
    if not same(operand.value.numel * sections, node.out.numel):
        return False
    place = next(
        axis for axis, extent in enumerate(view.shape) if same(extent, sections) and same(view.strides[axis], 0)
    )
    shape, strides = ((*each[:place], *each[place + 1 :]) for each in (view.shape, view.strides))
    return Operand(operand.value, View(shape, strides, view.offset)).is_whole and same(view.offset, 0)
