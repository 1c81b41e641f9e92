"""Iteration spaces and accesses: extents and operands of a group → merged axes, strides and offsets by axis.

Iteration spaces: views → the loop extents at which every operand of a kernel is a plain strided access. The elements of
the space are numbered row-major. A view cuts that numbering at the suffix products of its merged extents; if the cuts
of all views divide one another, the quotients are loop extents on which each view has one stride per loop, and a
kernel needs no division inside its rows. Cuts may be symbolic: their divisibility is proven for all sizes. The sample's
sizes choose the cut that begins a row.

Accesses: a view in an iteration space → index arithmetic as data, its numbers collected as launch arguments. A number
that may differ between launches of one kernel is an :class:`Argument`: offsets of windows, strides between rows,
extents of rows. Vector code is specialized for other numbers: the step between elements, loops inside a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autodiff.extents import Dim, Extent, below, divides, minimum, same, sample_of
from bridge.compile.loop_ir.graph import Operand
from bridge.compile.loop_ir.operations import Access, Argument, Number, Term
from bridge.compile.loop_ir.views import View, merged
from bridge.compile.schedule.limits import Rules

__all__ = ["Arguments", "Space", "access", "column_strides", "make_space", "offset_of", "share_loops", "terms_of"]
__all__ += ["window"]


@dataclass(frozen=True)
class Space:
    """Loops of a kernel: ``rows`` extents outside (parallel), ``columns`` extents inside, vectors along the last.

    ``flat``: the space has no rows of its own; ``remainder`` elements follow the ``rows * columns``.
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
        place: dict[Dim, int] = {}  # cut → the loop that it begins, counted from the last
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

    ``reduces``: rows are reduced, so a row's vectors must be visited in the order of
    :mod:`bridge.compile.schedule.order`, whatever the column loops.
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
    if not all(divides(low, high) for low, high in pairwise(ordered)) or len(ordered) > limits.kernel.loops:
        return None
    if columns is None:
        if len(ordered) == 2:
            return Space(
                (elements // limits.rows.flat_row,), (limits.rows.flat_row,), elements % limits.rows.flat_row, flat=True
            )
        amount = sample_of(elements)
        columns = next(cut for cut in ordered if sample_of(cut) >= min(limits.rows.short_row, amount))
        if same(columns, elements) and amount > limits.rows.flat_row and len(ordered) > 2:
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
    """Sort key of cuts, from fine to coarse; deterministic for cuts of equal size.

    1 divides every cut, also one that is 0 in the sample.
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
        # A broadcast view forces a cut between the remaining and the reduced rows.
        accesses.append((View((elements // (reduced * inner), reduced, inner), (0, 1, 0)), 1))
    reduces = inside is not None and same(inside[1], 1)
    return make_space(elements, columns, accesses, rules, reduces=reduces) is not None


class Arguments:
    """Collects the integers of one launch; ``add`` with an equal key gives the same argument."""

    def __init__(self) -> None:
        self.numbers: list[Dim] = []
        self._known: dict[Hashable, Argument] = {}

    def add(self, number: Dim, key: Hashable) -> Argument:
        """``key`` must identify the number by its meaning, not by its value."""
        if key not in self._known:
            self._known[key] = Argument(len(self.numbers))
            self.numbers.append(number)
        return self._known[key]

    def known(self, number: Dim, key: Hashable) -> Number:
        """A constant of the plan, or, for an extent, an argument."""
        return number if isinstance(number, int) else self.add(number, key)

    def reaches(self, number: Dim, least: int, key: Hashable) -> bool | Argument:
        """Whether a number is at least ``least``; if only the launch knows, an argument that is 0 if not."""
        if not isinstance(number, Extent) or below(number, least):
            return not isinstance(number, Extent) and number >= least
        return self.add(minimum(1, number // least), key)


def access(space: Space, operand: Operand, scale: Dim, arguments: Arguments, *, fixed: bool = True) -> Access:
    """The access of a space's loops to an operand.

    Args:
        scale: see :meth:`Space.strides`.
        fixed: whether all loops inside a row stay constants, not only the last.
    """
    rows, columns = space.strides(operand.view, scale)
    key = window(operand, rows, columns)
    offset = offset_of(operand, key, arguments)
    dense = rows if space.flat else (1, space.column_count) if fixed else (1,)
    terms = terms_of(space.rows, rows, dense, ("rows", key), arguments)
    inside = column_strides(space, columns, key, arguments, fixed) if same(scale, 1) else ()
    return Access(offset, terms, inside)


def window(operand: Operand, rows: Sequence[Dim], columns: Sequence[Dim]) -> Hashable:
    """Identifies an access; for a window on part of a tensor, with the tensor: other launches' windows may differ."""
    view = operand.view
    touched = math.prod(extent for extent, stride in zip(view.shape, view.strides, strict=True) if not same(stride, 0))
    part = not below(operand.value.numel - touched, 1)
    return tuple(rows), tuple(columns), view.offset, operand.value if part else None


def offset_of(operand: Operand, key: Hashable, arguments: Arguments) -> Number:
    """A window's offset is an argument; a read of the whole tensor begins at a constant."""
    offset = operand.view.offset
    return offset if key[-1] is None and isinstance(offset, int) else arguments.add(offset, ("offset", key))


def column_strides(
    space: Space, strides: Sequence[Dim], key: Hashable, arguments: Arguments, fixed: bool = True
) -> tuple[Number, ...]:
    """Strides per column loop; the last loop's stays a constant if it is one, as do a dense row's."""
    inside: list[Number] = []
    for axis, stride in enumerate(strides[:-1]):
        known = fixed or axis + 2 == len(strides)
        dense = isinstance(stride, int) and (
            stride == 0 or (known and same(stride, math.prod(space.columns[axis + 1 :])))
        )
        inside.append(stride if dense else arguments.add(stride, ("column", axis, key)))
    return (*inside, arguments.known(strides[-1], ("column", len(inside), key)))


def terms_of(
    extents: Sequence[Dim], strides: Sequence[Dim], dense: Collection[Dim], key: Hashable, arguments: Arguments
) -> tuple[Term, ...]:
    """The terms (coordinate times stride) of nested loops numbered as one; ``dense`` strides stay constants."""
    loops = key[0]
    fixed = [stride for stride in dense if isinstance(stride, int)]
    return tuple(
        Term(
            1 if last + 1 == len(extents) else arguments.add(math.prod(extents[last + 1 :]), ("below", loops, last)),
            None if first == 0 else arguments.add(math.prod(extents[first : last + 1]), ("extent", loops, first, last)),
            stride if isinstance(stride, int) and stride in fixed else arguments.add(stride, ("stride", last, key)),
        )
        for first, last, stride in _runs(extents, strides)
    )


def _runs(extents: Sequence[Dim], strides: Sequence[Dim]) -> list[tuple[int, int, Dim]]:
    """``(first, last, stride)`` of merged loops, innermost first; leaves out loops of stride 0."""
    runs: list[tuple[int, int, Dim, Dim]] = []  # and the extent
    for axis in reversed(range(len(extents))):
        if runs and same(strides[axis], runs[-1][2] * runs[-1][3]):
            _, last, stride, extent = runs[-1]
            runs[-1] = (axis, last, stride, extent * extents[axis])
        else:
            runs.append((axis, axis, strides[axis], extents[axis]))
    return [(first, last, stride) for first, last, stride, _ in runs if not same(stride, 0)]
