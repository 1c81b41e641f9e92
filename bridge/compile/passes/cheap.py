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
from collections.abc import Collection
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

__all__ = ["Producers", "Recomputation", "box_of_arithmetic", "cast_where_read", "count_where_read"]
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


class Recomputation:
    """One walk over nodes, in which point-wise nodes read values that are computed again for them.

    Attributes:
        nodes: in order; ``producers``: of the values so far.
    """

    def __init__(self, rules: Rules) -> None:
        self.nodes: list[Node] = []
        self.producers = Producers(rules.limits)

    def read(self, operand: Operand, reader: Pointwise) -> Operand:
        """The operand of a point-wise node → the operand that it reads instead."""
        raise NotImplementedError

    def add(self, node: Node) -> None:
        """Appends a node."""
        if type(node) is Pointwise:
            reads = tuple(each if isinstance(each, Scalar) else self.read(each, node) for each in node.operands)
            node = node if reads == node.operands else replace(node, operands=reads)
        self.nodes.append(node)
        self.producers.add(node)

    def of(self, graph: Graph) -> Graph:
        """The graph after the walk."""
        for node in graph.nodes:
            self.add(node)
        return replace(graph, nodes=self.nodes)


def cast_where_read(graph: Graph, rules: Rules) -> Graph:
    """Moves casts into point-wise nodes that are larger, by the backend's factor, than the cast tensor."""
    return _Casts(rules).of(graph) if rules.limits.recompute.small_casts else graph


def count_where_read(graph: Graph, rules: Rules) -> Graph:
    """Counts in point-wise nodes instead of reading a constant range that is smaller by the backend's factor."""
    factor = rules.limits.recompute.small_casts
    counts = {value for value, constant in graph.constants.items() if factor and _counts(constant)}
    return _Counts(rules, counts).of(graph) if counts else graph


class _Casts(Recomputation):
    """Lets each larger point-wise consumer of a cast value cast that value's source itself."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._factor = rules.limits.recompute.small_casts

    def read(self, operand: Operand, reader: Pointwise) -> Operand:
        source = self.source(operand.value)
        if source is None or self._factor * sample_of(operand.value.numel) > sample_of(reader.out.numel):
            return operand
        view = replace(operand.view, offset=operand.view.offset + source.view.offset)
        out = Value(operand.value.name, operand.shape, operand.dtype)
        self.nodes.append(Pointwise("astype", (Operand(source.value, view),), out))
        return whole(out)

    def source(self, value: Value) -> Operand | None:
        """The dense operand that a value is cast from; ``None`` if it is no cast."""
        node = self.producers.arithmetic(value, draws=True)
        (source,) = (None,) if node is None or node.op != "astype" else node.operands
        return source if isinstance(source, Operand) and is_dense(source.view) else None


class _Counts(_Casts):
    """Casts of positions, in place of constants that count them."""

    def __init__(self, rules: Rules, counts: Collection[Value]) -> None:
        super().__init__(rules)
        self._counts = counts

    def source(self, value: Value) -> Operand | None:
        is_count = value in self._counts
        return whole(Value(value.name, value.shape, "int64", "index")) if is_count else None


def _counts(constant: torch.Tensor | Positions) -> bool:
    if isinstance(constant, Positions) or constant.dtype not in (torch.int32, torch.int64) or constant.ndim != 1:
        return False
    return VF.equal(constant, VF.arange(len(constant), dtype=constant.dtype, device=constant.device))


def recompute_row_values(graph: Graph, rules: Rules) -> Graph:
    """Recomputes small values from values in memory in each kernel that reads them, if these differ in size."""
    return _Copies(graph, rules).of(graph) if rules.limits.concats.section_elements else graph


class _Copies(Recomputation):
    def __init__(self, graph: Graph, rules: Rules) -> None:
        super().__init__(rules)
        self._free_reads = rules.limits.recompute.free_reads
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

    def read(self, operand: Operand, reader: Pointwise) -> Operand:
        if not self._is_small(operand, reader) or len(self._sizes[operand.value]) < 2:
            return operand
        value = self._copy(operand.value, sample_of(reader.out.numel))
        return operand if value is None else Operand(value, operand.view)

    def _copy(self, value: Value, size: int) -> Value | None:
        """Another computation of the value, for consumers of a size; ``None`` if it is not made of values in memory."""
        if (value, size) not in self._made:
            producer = self.producers.arithmetic(value)
            if producer is None or producer.out.dtype == "bool":
                return None
            read = tuple(self._operand(operand, value, size) for operand in producer.operands)
            if None in read:
                return None
            made = self._made[value, size] = Value(value.name, value.shape, value.dtype)
            self.nodes.append(Pointwise(producer.op, read, made))
        return self._made[value, size]

    def _operand(self, operand: Operand | Scalar, value: Value, size: int) -> Operand | Scalar | None:
        if isinstance(operand, Scalar) or not self.producers.is_of_a_kernel(operand.value):
            return operand
        if sample_of(operand.value.numel) > sample_of(value.numel):
            return None
        copied = self._copy(operand.value, size)
        return None if copied is None else Operand(copied, operand.view)
