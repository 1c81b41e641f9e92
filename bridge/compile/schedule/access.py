"""Accesses: a view in an iteration space → index arithmetic as data, its numbers collected as launch arguments.

What may differ between launches of one kernel is an :class:`Argument`: offsets of windows, strides between rows,
extents of rows. What vector code is made for stays a number: the step from element to element, loops inside a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence

from bridge.compile.loop_ir.access import Access, Argument, Number, Term
from bridge.compile.loop_ir.graph import Operand
from bridge.compile.schedule.space import Space

__all__ = ["Arguments", "access", "column_strides", "offset_of", "terms_of", "window"]


class Arguments:
    """The integers of one launch, collected; ``add`` with an equal key gives the same argument."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._known: dict[Hashable, Argument] = {}

    def add(self, number: int, key: Hashable) -> Argument:
        """``key`` says what the number is; it must determine it, and not by its amount."""
        if key not in self._known:
            self._known[key] = Argument(len(self.numbers))
            self.numbers.append(number)
        return self._known[key]


def access(space: Space, operand: Operand, scale: int, arguments: Arguments, *, fixed: bool = True) -> Access:
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
    return Access(offset, terms, () if scale != 1 else column_strides(space, columns, key, arguments, fixed))


def window(operand: Operand, rows: Sequence[int], columns: Sequence[int]) -> Hashable:
    """What tells an access from others. Windows on one tensor are told apart by what they are windows on: two tensors'
    may differ in another launch."""
    view = operand.view
    touched = math.prod(extent for extent, stride in zip(view.shape, view.strides, strict=True) if stride)
    return tuple(rows), tuple(columns), view.offset, operand.value if touched < operand.value.numel else None


def offset_of(operand: Operand, key: Hashable, arguments: Arguments) -> Number:
    """An argument for windows; what reads the whole tensor begins with it."""
    return operand.view.offset if key[-1] is None else arguments.add(operand.view.offset, ("offset", key))


def column_strides(
    space: Space, strides: Sequence[int], key: Hashable, arguments: Arguments, fixed: bool = True
) -> tuple[Number, ...]:
    """Per column loop; the last one's stays a number, as do those of a dense row."""
    inside: list[Number] = []
    for axis, stride in enumerate(strides[:-1]):
        known = fixed or axis + 2 == len(strides)
        dense = stride == 0 or (known and stride == math.prod(space.columns[axis + 1 :]))
        inside.append(stride if dense else arguments.add(stride, ("column", axis, key)))
    return (*inside, strides[-1])


def terms_of(
    extents: Sequence[int], strides: Sequence[int], dense: Collection[int], key: Hashable, arguments: Arguments
) -> tuple[Term, ...]:
    """The coordinates in nested loops, numbered as one, times their strides, of which the ``dense`` stay numbers."""
    loops = key[0]
    return tuple(
        Term(
            1 if last + 1 == len(extents) else arguments.add(math.prod(extents[last + 1 :]), ("below", loops, last)),
            None if first == 0 else arguments.add(math.prod(extents[first : last + 1]), ("extent", loops, first, last)),
            stride if stride in dense else arguments.add(stride, ("stride", last, key)),
        )
        for first, last, stride in _runs(extents, strides)
    )


def _runs(extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """``(first, last, stride)`` of loops that run through as one, innermost first, but not of those standing still."""
    runs: list[tuple[int, int, int, int]] = []  # and the extent
    for axis in reversed(range(len(extents))):
        if runs and strides[axis] == runs[-1][2] * runs[-1][3]:
            _, last, stride, extent = runs[-1]
            runs[-1] = (axis, last, stride, extent * extents[axis])
        else:
            runs.append((axis, axis, strides[axis], extents[axis]))
    return [(first, last, stride) for first, last, stride, _ in runs if stride]
