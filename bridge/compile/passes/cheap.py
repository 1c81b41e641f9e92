"""Recomputation of cheap arithmetic where it is read: a view of its result → the same arithmetic on views of operands.

The rest of the result is then perhaps never computed, or never stored. The values are the same, bit for bit: the same
operator is applied to the same elements.

*Cheap* means one operator, not a transcendental one, with at most one operand as large as the result: no more is read
than the result itself.
"""

from __future__ import annotations

from autodiff.extents import sample_of
from bridge.compile.codegen.pointwise import EXPENSIVE
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Concat, Node, Operand, Pad, Pointwise, Reduction, Scalar, Value
from bridge.compile.schedule.limits import Limits

__all__ = ["Producers", "box_of_arithmetic", "permuted_arithmetic"]


class Producers:
    """Of each value seen so far, the point-wise node that computes it; of a concatenation, or padding, none."""

    def __init__(self, limits: Limits) -> None:
        self._free_reads = limits.free_reads
        self._nodes: dict[Value, Pointwise] = {}
        self._amounts: dict[Value, int] = {}  # of elements that casts of broadcast tensors cast
        self._of_kernels: set[Value] = set()

    def add(self, node: Node) -> None:
        """A node that later ones may read."""
        if isinstance(node, Pointwise) and not isinstance(node, Concat | Pad):
            self._nodes[node.out] = node
            if node.op == "astype" and isinstance(node.operands[0], Operand):
                self._amounts[node.out] = self._amount(node.operands[0].value)
        if isinstance(node, Pointwise | Reduction):
            self._of_kernels.update(node.outs)

    def is_of_a_kernel(self, value: Value) -> bool:
        """Whether a generated kernel, of which no product is one, computes a value."""
        return value in self._of_kernels

    def cheap(self, value: Value) -> Pointwise | None:
        """The cheap arithmetic that computes a value, or ``None``."""
        node = self._nodes.get(value)
        return node if node is not None and self._is_cheap(node) else None

    def arithmetic(self, value: Value, draws: bool = False) -> Pointwise | None:
        """The arithmetic that computes a value, whatever it costs, or ``None``; ``draws``: also of drawn masks."""
        node = self._nodes.get(value)
        reads = () if node is None or draws else (read for read in node.operands if isinstance(read, Operand))
        return None if any(read.value.source == "index" for read in reads) else node

    def _is_cheap(self, node: Pointwise) -> bool:
        reads = [self._amount(read.value) for read in node.operands if isinstance(read, Operand)]
        made = sample_of(node.out.numel)
        large = [count for count in reads if self._free_reads * count > made]
        return node.op not in EXPENSIVE and len(large) <= 1

    def _amount(self, value: Value) -> int:
        """How many elements of memory a value is read from."""
        return min(sample_of(value.numel), self._amounts.get(value, sample_of(value.numel)))


def box_of_arithmetic(node: Pointwise, read: Operand) -> list[Operand | Scalar] | None:
    """The operands from which ``node``'s operator computes a box of its result; ``None`` if the view cuts out no box.

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
    """The operands from which ``node``'s operator computes a permutation of its result; ``None`` where no views
    express them.

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
