"""Iteration spaces: views → the loop extents at which every operand of a kernel is a plain strided access.

The elements of the space are numbered row-major. A view cuts that numbering at the suffix products of its merged
extents; if the cuts of all views divide one another, the quotients are loop extents on which each view has one stride
per loop, and a kernel needs no division anywhere inside its rows.

Cuts may be symbolic: that they divide one another is proven for all sizes. Which of them begins a row is chosen for the
sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autodiff.extents import Dim, Extent, divides, same, sample_of
from bridge.compile.loop_ir.views import View, merged
from bridge.compile.schedule.limits import Rules

__all__ = ["Space", "make_space", "share_loops"]


@dataclass(frozen=True)
class Space:
    """Loops of a kernel: ``rows`` extents outside (parallel), ``columns`` extents inside, vectors along the last.

    ``flat``: nothing divides the elements into rows; ``remainder`` of them are behind ``rows * columns``.
    """

    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    remainder: Dim = 0
    flat: bool = False

    @property
    def row_count(self) -> Dim:
        return math.prod(self.rows)

    @property
    def column_count(self) -> Dim:
        return math.prod(self.columns)

    def strides(self, view: View, scale: Dim = 1) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
        """Strides of a view per row loop and per column loop. ``scale``: elements of the space per element of the
        view (the row length, for views with one element per row)."""
        dims = merged(view)
        if self.flat:
            step = dims[0][1] if dims else 0
            return (step * self.columns[0],), (step,)
        loops = self.rows + self.columns
        place: dict[Dim, int] = {}  # of each cut, the loop that it begins, counted from the last
        position: Dim = 1
        for index, extent in enumerate(reversed(loops)):
            if not same(extent, 1):
                place[position] = index
            position *= extent
        place[position] = len(loops)
        strides: list[Dim] = [0] * len(loops)
        below = scale
        for extent, stride in reversed(dims):
            step = stride
            for index in range(place[below], place[below * extent]):
                strides[-1 - index] = 0 if same(loops[-1 - index], 1) else step
                step *= loops[-1 - index]
            below *= extent
        return tuple(strides[: len(self.rows)]), tuple(strides[len(self.rows) :])


def make_space(
    elements: Dim, columns: Dim | None, accesses: Sequence[tuple[View, Dim]], rules: Rules, *, reduces: bool
) -> Space | None:
    """The space of ``elements`` with rows of ``columns`` (chosen here if ``None``) on which all ``accesses``
    ``(view, scale)`` are strided; ``None`` if there is none.

    ``reduces``: rows are reduced, so the vectors of a row must be walked in the order of
    :mod:`bridge.compile.schedule.order` whatever the column loops are.
    """
    limits, order = rules.limits, rules.order
    cuts: set[Dim] = {1, elements}
    if columns is not None:
        cuts.add(columns)
    for view, scale in accesses:
        below = scale
        for extent, _ in reversed(merged(view)):
            cuts.add(below)
            below *= extent
    ordered = sorted(cuts, key=_order)
    if not all(divides(low, high) for low, high in pairwise(ordered)) or len(ordered) > limits.loops:
        return None
    if columns is None:
        if len(ordered) == 2:
            return Space((elements // limits.flat_row,), (limits.flat_row,), elements % limits.flat_row, flat=True)
        amount = sample_of(elements)
        columns = next(cut for cut in ordered if sample_of(cut) >= min(limits.short_row, amount))
        if same(columns, elements) and amount > limits.flat_row and len(ordered) > 2:
            columns = ordered[-2]
    extents = [high // low for low, high in pairwise(ordered)]
    inside = ordered.index(columns)
    inner = tuple(reversed(extents[:inside])) or (1,)
    if reduces and len(inner) > 1:
        turn = order.lanes * max(order.possible_accumulators(columns))
        if not divides(turn, inner[-1]):
            return None
    return Space(tuple(reversed(extents[inside:])) or (1,), inner)


def _order(cut: Dim) -> tuple[bool, int, str]:
    """From the finest cut to the coarsest; those of one amount in an order that is the same every time.

    1 divides every other, also an extent that is 0 in the sample.
    """
    return not same(cut, 1), sample_of(cut), str(cut) if isinstance(cut, Extent) else ""


def share_loops(views: Sequence[View], elements: Dim, rules: Rules, inside: tuple[Dim, Dim] | None = None) -> bool:
    """Whether one loop nest over ``elements`` can read all the views.

    ``inside``: ``(reduced, inner)`` extents of a reduction, whose view enumerates ``(outer, reduced, inner)``.
    """
    accesses = [(view, 1) for view in views]
    columns = None
    if inside:
        reduced, inner = inside
        columns = reduced if same(inner, 1) else inner
        # A broadcast view that forces a cut between the remaining and the reduced rows.
        accesses.append((View((elements // (reduced * inner), reduced, inner), (0, 1, 0)), 1))
    reduces = inside is not None and same(inside[1], 1)
    return make_space(elements, columns, accesses, rules, reduces=reduces) is not None
