"""Accesses: a view in an iteration space → index arithmetic as data, its numbers collected as launch arguments.

What may differ between launches of one kernel is an :class:`Argument`: offsets of windows, strides between rows,
extents of rows. What vector code is made for stays a number: the step from element to element, loops inside a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence

from autodiff.extents import Dim, Extent, below, minimum, same
from bridge.compile.loop_ir.access import Access, Argument, Number, Term
from bridge.compile.loop_ir.graph import Operand
from bridge.compile.schedule.space import Space

__all__ = ["Arguments", "access", "column_strides", "offset_of", "terms_of", "window"]


class Arguments:
    """The integers of one launch, collected; ``add`` with an equal key gives the same argument."""

    def __init__(self) -> None:
        self.numbers: list[Dim] = []
        self._known: dict[Hashable, Argument] = {}

    def add(self, number: Dim, key: Hashable) -> Argument:
        """``key`` says what the number is; it must determine it, and not by its amount."""
        if key not in self._known:
            self._known[key] = Argument(len(self.numbers))
            self.numbers.append(number)
        return self._known[key]

    def known(self, number: Dim, key: Hashable) -> Number:
        """A number of the plan, or the argument for an extent."""
        return number if isinstance(number, int) else self.add(number, key)

    def reaches(self, number: Dim, least: int, key: Hashable) -> bool | Argument:
        """Whether a number is so large; where that is decided at the launch, an argument that is 0 if not."""
        if not isinstance(number, Extent) or below(number, least):
            return not isinstance(number, Extent) and number >= least
        return self.add(minimum(1, number // least), key)


def access(space: Space, operand: Operand, scale: Dim, arguments: Arguments, *, fixed: bool = True) -> Access:
    """How the loops of a space reach an operand.

    Args:
        scale: see :meth:`Space.strides`.
        fixed: whether all loops inside a row stay numbers, not only the last.
    """
    rows, columns = space.strides(operand.view, scale)
    key = window(operand, rows, columns)
    offset = offset_of(operand, key, arguments)
    dense = rows if space.flat else (1, space.column_count) if fixed else (1,)
    terms = terms_of(space.rows, rows, dense, ("rows", key), arguments)
    inside = column_strides(space, columns, key, arguments, fixed) if same(scale, 1) else ()
    return Access(offset, terms, inside)


def window(operand: Operand, rows: Sequence[Dim], columns: Sequence[Dim]) -> Hashable:
    """What tells an access from others. Windows on one tensor are told apart by what they are windows on: two tensors'
    may differ in another launch."""
    view = operand.view
    touched = math.prod(extent for extent, stride in zip(view.shape, view.strides, strict=True) if not same(stride, 0))
    part = not below(operand.value.numel - touched, 1)
    return tuple(rows), tuple(columns), view.offset, operand.value if part else None


def offset_of(operand: Operand, key: Hashable, arguments: Arguments) -> Number:
    """An argument for windows; what reads the whole tensor begins with it."""
    offset = operand.view.offset
    return offset if key[-1] is None and isinstance(offset, int) else arguments.add(offset, ("offset", key))


def column_strides(
    space: Space, strides: Sequence[Dim], key: Hashable, arguments: Arguments, fixed: bool = True
) -> tuple[Number, ...]:
    """Per column loop; the last one's stays a number if it is one, as do those of a dense row."""
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
    """The coordinates in nested loops, numbered as one, times their strides, of which the ``dense`` stay numbers."""
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
    """``(first, last, stride)`` of loops that run through as one, innermost first, but not of those standing still."""
    runs: list[tuple[int, int, Dim, Dim]] = []  # and the extent
    for axis in reversed(range(len(extents))):
        if runs and same(strides[axis], runs[-1][2] * runs[-1][3]):
            _, last, stride, extent = runs[-1]
            runs[-1] = (axis, last, stride, extent * extents[axis])
        else:
            runs.append((axis, axis, strides[axis], extents[axis]))
    return [(first, last, stride) for first, last, stride, _ in runs if not same(stride, 0)]
