"""Shapes of dims: comparison without a guard, broadcasting, and which elements a slice reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autodiff.extents.extent import Dim, Extent, sample_of
from autodiff.extents.proofs import at_most, same

__all__ = ["Slice", "broadcast", "same_shape", "slice_of"]

_ENDLESS = 2**62
"""More than any extent: an end that stands for "all the rest"."""


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal for all sizes; asking guards nothing."""
    return len(a) == len(b) and all(one is other or same(one, other) for one, other in zip(a, b, strict=True))


def broadcast(shapes: Iterable[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The shape of what an operator gives for operands that broadcast against each other.

    Extents that are not the same for all sizes are compared, which may guard. ``ValueError`` if they do not fit.
    """
    shapes = list(shapes)
    rank = max((len(extents) for extents in shapes), default=0)
    padded = [(1,) * (rank - len(extents)) + tuple(extents) for extents in shapes]
    return tuple([_common(column) for column in zip(*padded, strict=True)])


def _common(column: Iterable[Dim]) -> Dim:
    found: Dim = 1
    for extent in column:
        if _is_one(extent) or same(extent, found):
            continue
        if _is_one(found) or (sample_of(found) == 1 and found == 1):
            found = extent
        elif sample_of(extent) == 1 and extent == 1:
            continue
        elif extent != found:
            raise ValueError(f"wanted extents that broadcast, got {found} and {extent}")
        elif not isinstance(extent, Extent):
            found = extent
    return found


def _is_one(extent: Dim) -> bool:
    return not isinstance(extent, Extent) and extent == 1


@dataclass(frozen=True)
class Slice:
    """The elements ``begin``, ``begin + step``, …, ``length`` of them; ``step`` is not 0."""

    begin: Dim
    length: Dim
    step: int

    @property
    def last(self) -> Dim:
        """The last element, if there is one."""
        return self.begin + (self.length - 1) * self.step

    def is_all_of(self, extent: Dim) -> bool:
        """Whether these are all elements of an axis in order, for all sizes."""
        in_order = self.step == 1 or same(self.length, 1)
        return in_order and same(self.begin, 0) and same(self.length, extent)


def slice_of(begin: Dim, end: Dim, step: int, extent: Dim) -> Slice:
    """What ``begin:end:step`` reads of an axis, as Python does: counted from the end if negative, ends cut off.

    Bounds are compared with the axis; what is not the same for all sizes is a guard.
    """
    if not any(isinstance(each, Extent) for each in (begin, end, extent)):
        positions = range(*slice(begin, end, step).indices(extent))
        return Slice(positions.start, len(positions), step)
    low, high = (0, extent) if step > 0 else (-1, extent - 1)
    begin, end = (_within(bound, low, high, extent) for bound in (begin, end))
    span = end - begin if step > 0 else begin - end
    if not at_most(0, span) and span < 0:
        return Slice(begin, 0, step)
    return Slice(begin, (span + abs(step) - 1) // abs(step), step)


def _within(bound: Dim, low: Dim, high: Dim, extent: Dim) -> Dim:
    """A bound counted from the start, cut off at both ends."""
    if not isinstance(bound, Extent) and abs(bound) >= _ENDLESS:
        return high if bound > 0 else low
    if bound < 0:
        bound = bound + extent
        return low if bound < low else bound
    return high if bound > high else bound
