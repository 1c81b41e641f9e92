"""Recomputation of cheap arithmetic where it is read: slices, permutations and sections of its result.

A view of the result of cheap arithmetic becomes the same arithmetic on views of its operands. The rest of the result is
then perhaps never computed, or never stored. The values are the same, bit for bit: the same operator is applied to the
same elements.

*Cheap* means one operator, not a transcendental one, with at most one operand as large as the result: no more is read
than the result itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bridge.compile.codegen.pointwise import EXPENSIVE
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Operand, Pointwise, Scalar, Value

__all__ = ["Sections", "box_of_arithmetic", "permuted_arithmetic"]

Emit = Callable[[str, Sequence["Operand | Scalar"], Sequence[int], str], Operand]
"""``(op, operands, shape, element type)`` → the result of a new point-wise node."""


def _is_cheap(node: Pointwise) -> bool:
    large = [read for read in node.operands if isinstance(read, Operand) and 4 * read.value.numel > node.out.numel]
    return node.op not in EXPENSIVE and len(large) <= 1


def box_of_arithmetic(node: Pointwise | None, operand: Operand) -> tuple[str, list[Operand | Scalar]] | None:
    """A box of a node's result → ``(op, operands)`` that compute it; ``None`` if the view is no box or ``node`` not
    cheap.

    Example: ``(x + b)[:, 2:4]`` → ``add`` of ``x[:, 2:4]`` and ``b[2:4]``.
    """
    corner = views.box(operand.view, node.out.shape) if node is not None and _is_cheap(node) else None
    if corner is None:
        return None
    return node.op, [
        Scalar(read.number, read.dtype, operand.shape)
        if isinstance(read, Scalar)
        else Operand(read.value, views.cut_out(read.view, corner, operand.shape))
        for read in node.operands
    ]


def permuted_arithmetic(node: Pointwise | None, operand: Operand) -> list[Operand | Scalar] | None:
    """A permutation of a node's result → the node's operands in that order; ``None`` where no views express them.

    Example: the transpose of ``x + b`` → ``x`` transposed, ``b`` along the other dimension.
    """
    if node is None or not _is_cheap(node):
        return None
    moved: list[Operand | Scalar] = []
    for read in node.operands:
        if isinstance(read, Scalar):
            moved.append(Scalar(read.number, read.dtype, operand.shape))
            continue
        view = views.compose(operand.view, read.view)
        if view is None:
            return None
        moved.append(Operand(read.value, view))
    return moved


class Sections:
    """Operands of a concatenation as all of its sections see them.

    Args:
        axis: of the concatenation.
        spread: the result's shape with that axis cut into ``(sections, step)``.
        producer: of a value, the arithmetic that made it.
        emit: adds a node.
    """

    def __init__(
        self, axis: int, spread: tuple[int, ...], producer: Callable[[Value], Pointwise | None], emit: Emit
    ) -> None:
        self.axis = axis
        self.spread = spread
        self._producer = producer
        self._emit = emit

    def place(self, operand: Operand | Scalar, begin: int, depth: int) -> Operand | Scalar:
        """``step`` elements from ``begin`` on along the axis, the same in every section.

        Cheap arithmetic that made the operand, to a ``depth`` of so many operators, is recomputed here.
        """
        if isinstance(operand, Scalar):
            return Scalar(operand.number, operand.dtype, self.spread)
        inside = self._recomputed(operand, begin, depth) if depth else None
        return Operand(operand.value, self._repeated(operand.view, begin)) if inside is None else inside

    def _repeated(self, view: views.View, begin: int) -> views.View:
        strides = (*view.strides[: self.axis], 0, *view.strides[self.axis :])
        return views.View(self.spread, strides, view.offset + begin * view.strides[self.axis])

    def _recomputed(self, operand: Operand, begin: int, depth: int) -> Operand | None:
        found = box_of_arithmetic(self._producer(operand.value), operand)
        if found is None:
            return None
        op, reads = found
        placed = [self.place(read, begin, depth - 1) for read in reads]
        return self._emit(op, placed, self.spread, operand.dtype)
