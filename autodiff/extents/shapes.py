"""Shapes of dims: comparison without a guard, broadcasting, and the elements that a slice reads.

Proofs: facts about dims that hold for all sizes in their scope's ranges; ``False`` where there is no proof.
A proof adds no guard. Proofs serve choices among correct ways: an order of loops, a merge of loops, a smaller index
type. Code that is right only if the answer is true must ask the extent itself, which adds a guard without a proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autodiff.extents.extent import Dim, Extent, sample_of
from autodiff.extents.polynomial import Terms, divide


def same(a: Dim, b: Dim) -> bool:
    """Whether two dims are equal for all sizes."""
    difference = a - b
    if not isinstance(difference, Extent):
        return difference == 0
    bounds = difference.scope.range_of(difference)
    return bounds.low == bounds.high == 0


def divides(divisor: Dim, value: Dim) -> bool:
    """Whether ``value`` is a multiple of ``divisor``, which is not 0, for all sizes."""
    if not isinstance(value, Extent) and not isinstance(divisor, Extent):
        return value % divisor == 0
    _, left = divide(_terms(value), _terms(divisor))
    return not left


def content(value: Dim) -> int:
    """The largest number that provably divides a value (not 0) for all sizes."""
    return math.gcd(*(factor for _, factor in value.terms)) if isinstance(value, Extent) else abs(value)


def _terms(value: Dim) -> Terms:
    return value.terms if isinstance(value, Extent) else ((((), value),) if value else ())


def below(value: Dim, bound: int) -> bool:
    """Whether ``value < bound`` for all sizes."""
    if not isinstance(value, Extent):
        return value < bound
    high = value.scope.range_of(value).high
    return high is not None and high < bound


def at_most(a: Dim, b: Dim) -> bool:
    """Whether ``a <= b`` for all sizes."""
    difference = b - a
    if not isinstance(difference, Extent):
        return difference >= 0
    low = difference.scope.range_of(difference).low
    return low is not None and low >= 0


_ENDLESS = 2**62
"""More than any extent: an end that stands for "all the rest"."""


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal for all sizes; adds no guard."""
    return len(a) == len(b) and all(one is other or same(one, other) for one, other in zip(a, b, strict=True))


def broadcast(shapes: Iterable[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The shape of an operator's result for operands that broadcast against each other.

    Compares extents that are not equal for all sizes, which may add a guard. ``ValueError`` if they do not fit.
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
        """Whether the slice is all elements of an axis in order, for all sizes."""
        in_order = self.step == 1 or same(self.length, 1)
        return in_order and same(self.begin, 0) and same(self.length, extent)


def slice_of(begin: Dim, end: Dim, step: int, extent: Dim) -> Slice:
    """The elements that ``begin:end:step`` reads of an axis, by Python's rules for negative and too large bounds.

    Compares the bounds with the axis; a comparison that differs between sizes adds a guard.
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
    """A bound counted from the start, clamped to ``low`` and ``high``."""
    if not isinstance(bound, Extent) and abs(bound) >= _ENDLESS:
        return high if bound > 0 else low
    if bound < 0:
        bound = bound + extent
        return low if bound < low else bound
    return high if bound > high else bound
