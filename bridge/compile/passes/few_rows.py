"""Few rows: a sum of few long rows → additions, which are fused with what makes the rows and with what reads the sum.

The gradient of a key that four heads share, of a table of positions that a batch of eight reads: each result is a sum
of as many elements, which one thread adds in order in any case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autodiff.extents import Extent, same, sample_of
from bridge.compile.codegen.emit import compute_type
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Reduction, Scalar, Value, whole
from bridge.compile.loop_ir.views import cut_out, dense
from bridge.compile.schedule.limits import Rules

__all__ = ["add_few_rows"]


def add_few_rows(graph: Graph, rules: Rules) -> Graph:
    """The graph with additions in the place of such sums; each begins with zero, as the reduction's."""
    nodes: list[Node] = []
    for node in graph.nodes:
        rows = _rows(node) if isinstance(node, Reduction) and _is_of_few(node, rules) else None
        nodes += [node] if rows is None else _added(rows, node.out)
    return replace(graph, nodes=nodes)


def _is_of_few(node: Reduction, rules: Rules) -> bool:
    """Whether it is worth it: where less is added up, a launch has few threads, and a row is theirs together."""
    if node.op != "sum" or same(node.inner, 1) or isinstance(node.reduced, Extent):
        return False
    if not 1 < node.reduced <= rules.limits.added_rows or sample_of(node.out.numel) <= rules.limits.single_elements:
        return False
    return same(rules.order.column_chunks(node.reduced, node.inner), 1)


def _rows(node: Reduction) -> list[Operand] | None:
    """What is added, one after another, the axes that are reduced with an extent of 1; ``None`` if those are cut."""
    axes, view = _axes(node), node.operand.view
    if axes is None:
        return None
    rows = []
    for place in itertools.product(*(range(view.shape[axis]) for axis in axes)):
        corner = [0] * len(view.shape)
        corner[axes.start : axes.stop] = place
        extents = [1 if axis in axes else extent for axis, extent in enumerate(view.shape)]
        rows.append(Operand(node.operand.value, cut_out(view, corner, extents)))
    return rows


def _axes(node: Reduction) -> range | None:
    """The axes of the operand's view that are reduced; ``None`` where one is in part."""
    extents = node.operand.view.shape
    for begin, end in itertools.combinations(range(len(extents) + 1), 2):
        parts = extents[:begin], extents[begin:end], extents[end:]
        if all(map(same, map(math.prod, parts), (node.outer, node.reduced, node.inner))):
            return range(begin, end)
    return None


def _added(rows: Sequence[Operand], out: Value) -> list[Node]:
    """The sum in order, in the type in which sums are computed, rounded once."""
    dtype, extents = compute_type(out.dtype), rows[0].shape
    nodes: list[Node] = []

    def computed(op: str, *operands: Operand | Scalar) -> Operand:
        nodes.append(Pointwise(op, operands, Value(out.name, extents, dtype)))
        return whole(nodes[-1].out)

    total: Operand | Scalar = Scalar(0.0 if "float" in dtype else 0, dtype, extents)
    for row in rows:
        total = computed("add", total, row if row.dtype == dtype else computed("astype", row))
    shaped = Operand(total.value, dense(out.shape))
    return [*nodes, Pointwise("copy" if dtype == out.dtype else "astype", (shaped,), out)]
