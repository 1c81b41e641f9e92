"""Rematerialization at consumers: a cheap value → computed again in each kernel that reads it, with the same bits.

Cheap arithmetic: a view of its result → the same operator on views of its operands. The rest of the result is then
perhaps never computed, or never stored. *Cheap* means one operator, not a transcendental one, with at most one operand
as large as the result: the kernel reads no more than the result itself.

Casts: a cast of a small tensor that a larger computation reads → the cast in that computation. Autocast casts each
bias: on a GPU that is a kernel whose launch takes longer than its work.

Positions: a constant ``0, 1, 2, …`` that a larger computation reads → each element's index, without a load. For
example, a GPU would read four bytes of a constant for each element that a row index is compared with.

Row values: a few values per row that kernels with rows of several lengths read → computed in each of these kernels.
The reciprocal root of a variance is one number per row. Gates of a recurrent cell read it in slices of rows, a
normalization in whole rows; a kernel that stores it would have to run before both; recomputed, it costs an operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch

from autodiff.extents import sample_of
from bridge.base.torch_internals import VF
from bridge.compile.codegen.pointwise import EXPENSIVE
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import (
    Concat,
    Graph,
    Node,
    Operand,
    Pad,
    Pointwise,
    Positions,
    Reduction,
    Scalar,
    Value,
    whole,
)
from bridge.compile.loop_ir.views import is_dense
from bridge.compile.schedule.limits import Limits, Rules

__all__ = ["Producers", "box_of_arithmetic", "cast_where_read", "count_where_read"]
__all__ += ["permuted_arithmetic", "recompute_row_values"]


class Producers:
    """Maps each value seen so far to the point-wise node that computes it; leaves out concatenation and padding."""

    def __init__(self, limits: Limits) -> None:
        self._free_reads = limits.recompute.free_reads
        self._nodes: dict[Value, Pointwise] = {}
        self._amounts: dict[Value, int] = {}  # elements in memory that a cast of a broadcast tensor reads
        self._of_kernels: set[Value] = set()

    def add(self, node: Node) -> None:
        """Notes a node for later ones."""
        if isinstance(node, Pointwise) and not isinstance(node, Concat | Pad):
            self._nodes[node.out] = node
            if node.op == "astype" and isinstance(node.operands[0], Operand):
                self._amounts[node.out] = self._amount(node.operands[0].value)
        if isinstance(node, Pointwise | Reduction):
            self._of_kernels.update(node.outs)

    def is_of_a_kernel(self, value: Value) -> bool:
        """Whether a generated kernel, other than a product, computes a value."""
        return value in self._of_kernels

    def cheap(self, value: Value) -> Pointwise | None:
        """The cheap arithmetic that computes a value, or ``None``."""
        node = self._nodes.get(value)
        return node if node is not None and self._is_cheap(node) else None

    def arithmetic(self, value: Value, draws: bool = False) -> Pointwise | None:
        """The point-wise node that computes a value, at any cost, or ``None``; ``draws``: also dropout masks."""
        node = self._nodes.get(value)
        reads = () if node is None or draws else (read for read in node.operands if isinstance(read, Operand))
        return None if any(read.value.source == "index" for read in reads) else node

    def _is_cheap(self, node: Pointwise) -> bool:
        reads = [self._amount(read.value) for read in node.operands if isinstance(read, Operand)]
        made = sample_of(node.out.numel)
        large = [count for count in reads if self._free_reads * count > made]
        return node.op not in EXPENSIVE and len(large) <= 1

    def _amount(self, value: Value) -> int:
        """The number of elements in memory that a value is computed from."""
        return min(sample_of(value.numel), self._amounts.get(value, sample_of(value.numel)))


def box_of_arithmetic(node: Pointwise, read: Operand) -> list[Operand | Scalar] | None:
    """The operands from which ``node``'s operator computes a box of its result; ``None``: the view is no box.

    Example: ``(x + b)[:, 2:4]`` → ``x[:, 2:4]`` and ``b[2:4]``.
    """
    corner = views.box(read.view, node.out.shape)
    if corner is None:
        return None
    return [
        Scalar(operand.number, operand.dtype, read.shape)
        if isinstance(operand, Scalar)
        else Operand(operand.value, views.cut_out(operand.view, corner, read.shape))
        for operand in node.operands
    ]


def permuted_arithmetic(node: Pointwise, read: Operand) -> list[Operand | Scalar] | None:
    """The operands from which ``node``'s operator computes a permutation of its result; ``None``: no views express it.

    Example: the transpose of ``x + b`` → ``x`` transposed, ``b`` along the other dimension.
    """
    moved: list[Operand | Scalar] = []
    for operand in node.operands:
        if isinstance(operand, Scalar):
            moved.append(Scalar(operand.number, operand.dtype, read.shape))
            continue
        view = views.compose(read.view, operand.view)
        if view is None:
            return None
        moved.append(Operand(operand.value, view))
    return moved


def cast_where_read(graph: Graph, rules: Rules) -> Graph:
    """Moves casts into point-wise nodes that are larger, by the backend's factor, than the cast tensor."""
    casts: dict[Value, Operand] = {}

    def note(node: Pointwise) -> None:
        if node.op == "astype" and isinstance(node.operands[0], Operand) and is_dense(node.operands[0].view):
            casts[node.out] = node.operands[0]

    return _cast_at_readers(graph, rules, casts.get, note)


def count_where_read(graph: Graph, rules: Rules) -> Graph:
    """Counts in point-wise nodes instead of reading a constant range that is smaller by the backend's factor."""
    counts = {
        value for value, constant in graph.constants.items() if rules.limits.recompute.small_casts and _counts(constant)
    }

    def places(value: Value) -> Operand | None:
        return whole(Value(value.name, value.shape, "int64", "index")) if value in counts else None

    return _cast_at_readers(graph, rules, places) if counts else graph


def _counts(constant: torch.Tensor | Positions) -> bool:
    if isinstance(constant, Positions) or constant.dtype not in (torch.int32, torch.int64) or constant.ndim != 1:
        return False
    return VF.equal(constant, VF.arange(len(constant), dtype=constant.dtype, device=constant.device))


def _cast_at_readers(
    graph: Graph,
    rules: Rules,
    source_of: Callable[[Value], Operand | None],
    note: Callable[[Pointwise], None] = lambda node: None,
) -> Graph:
    """Lets each larger point-wise consumer of a value cast that value's source itself.

    Args:
        source_of: a value → the dense operand that it is cast from; ``None`` if it is no cast.
        note: called with each point-wise node, in order.
    """
    factor = rules.limits.recompute.small_casts
    if not factor:
        return graph
    nodes: list[Node] = []

    def read(operand: Operand | Scalar, reader: Pointwise) -> Operand | Scalar:
        source = None if isinstance(operand, Scalar) else source_of(operand.value)
        if source is None or factor * sample_of(operand.value.numel) > sample_of(reader.out.numel):
            return operand
        view = replace(operand.view, offset=operand.view.offset + source.view.offset)
        out = Value(operand.value.name, operand.shape, operand.dtype)
        nodes.append(Pointwise("astype", (Operand(source.value, view),), out))
        return whole(out)

    for node in graph.nodes:
        if type(node) is Pointwise:
            reads = tuple(read(operand, node) for operand in node.operands)
            node = node if reads == node.operands else replace(node, operands=reads)
            note(node)
        nodes.append(node)
    return replace(graph, nodes=nodes)


def recompute_row_values(graph: Graph, rules: Rules) -> Graph:
    """Recomputes small values from values in memory in each kernel that reads them, if these differ in size."""
    if not rules.limits.concats.section_elements:
        return graph
    copies = _Copies(graph, rules)
    for node in graph.nodes:
        copies.add(node)
    return replace(graph, nodes=copies.nodes)


class _Copies:
    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.nodes: list[Node] = []
        self._free_reads = rules.limits.recompute.free_reads
        self._producers = Producers(rules.limits)
        self._made: dict[tuple[Value, int], Value] = {}
        self._sizes: dict[Value, set[int]] = defaultdict(set)
        for node in graph.nodes:
            for operand in node.operands:
                if isinstance(operand, Operand) and self._is_small(operand, node):
                    self._sizes[operand.value].add(sample_of(node.out.numel))

    def _is_small(self, operand: Operand, node: Node) -> bool:
        """Whether a point-wise node reads a value that is small compared with its result."""
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
        """Another computation of the value, for consumers of a size; ``None`` if it is not made of values in memory."""
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
