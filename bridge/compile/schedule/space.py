"""Iteration spaces: views → the loop extents at which every operand of a kernel is a plain strided access.

The elements of the space are numbered row-major. A view cuts that numbering at the suffix products of its merged
extents; if the cuts of all views divide one another, the quotients are loop extents on which each view has one stride
per loop, and a kernel needs no division anywhere inside its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bridge.compile.loop_ir.views import View, merged
from bridge.compile.schedule.limits import Rules

__all__ = ["Space", "make_space", "share_loops"]


@dataclass(frozen=True)
class Space:
    """Loops of a kernel: ``rows`` extents outside (parallel), ``columns`` extents inside, vectors along the last.

    ``flat``: nothing divides the elements into rows; ``remainder`` of them are behind ``rows * columns``.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    remainder: int = 0
    flat: bool = False

    @property
    def row_count(self) -> int:
        return math.prod(self.rows)

    @property
    def column_count(self) -> int:
        return math.prod(self.columns)

    def strides(self, view: View, scale: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Strides of a view per row loop and per column loop. ``scale``: elements of the space per element of the
        view (the row length, for views with one element per row)."""
        dims = merged(view)
        if self.flat:
            step = dims[0][1] if dims else 0
            return (step * self.columns[0],), (step,)
        ends = []  # (elements of the space below this dimension, elements up to and with it, stride)
        below = scale
        for extent, stride in reversed(dims):
            ends.append((below, below * extent, stride))
            below *= extent
        strides = []
        position = 1
        for extent in reversed(self.rows + self.columns):
            stride = 0
            for low, high, step in ends:
                if extent != 1 and low <= position < high:
                    stride = step * (position // low)
            strides.append(stride)
            position *= extent
        strides.reverse()
        return tuple(strides[: len(self.rows)]), tuple(strides[len(self.rows) :])


def make_space(
    elements: int, columns: int | None, accesses: Sequence[tuple[View, int]], rules: Rules, *, reduces: bool
) -> Space | None:
    """The space of ``elements`` with rows of ``columns`` (chosen here if ``None``) on which all ``accesses``
    ``(view, scale)`` are strided; ``None`` if there is none.

    ``reduces``: rows are reduced, so the vectors of a row must be walked in the order of
    :mod:`bridge.compile.schedule.order` whatever the column loops are.
    """
    limits, order = rules.limits, rules.order
    cuts = {1, elements}
    if columns is not None:
        cuts.add(columns)
    for view, scale in accesses:
        below = scale
        for extent, _ in reversed(merged(view)):
            cuts.add(below)
            below *= extent
    ordered = sorted(cuts)
    if any(high % low for low, high in pairwise(ordered)) or len(ordered) > limits.loops:
        return None
    if columns is None:
        if ordered[-2:] == [1, elements]:
            return Space((elements // limits.flat_row,), (limits.flat_row,), elements % limits.flat_row, flat=True)
        columns = next(cut for cut in ordered if cut >= min(limits.short_row, elements))
        if columns == elements and elements > limits.flat_row and len(ordered) > 2:
            columns = ordered[-2]
    extents = [high // low for low, high in pairwise(ordered)]
    inside = ordered.index(columns)
    inner = tuple(reversed(extents[:inside])) or (1,)
    if reduces and len(inner) > 1 and inner[-1] % (order.lanes * order.accumulators(columns)):
        return None
    return Space(tuple(reversed(extents[inside:])) or (1,), inner)


def share_loops(views: Sequence[View], elements: int, rules: Rules, inside: tuple[int, int] | None = None) -> bool:
    """Whether one loop nest over ``elements`` can read all the views.

    ``inside``: ``(reduced, inner)`` extents of a reduction, whose view enumerates ``(outer, reduced, inner)``.
    """
    accesses = [(view, 1) for view in views]
    columns = None
    if inside:
        reduced, inner = inside
        columns = reduced if inner == 1 else inner
        # A broadcast view that forces a cut between the remaining and the reduced rows.
        accesses.append((View((elements // (reduced * inner), reduced, inner), (0, 1, 0)), 1))
    reduces = inside is not None and inside[1] == 1
    return make_space(elements, columns, accesses, rules, reduces=reduces) is not None
