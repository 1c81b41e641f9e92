"""Proofs: facts about dims that hold for all sizes in their scope's ranges; ``False`` where there is no proof.

Asking guards nothing. For the compiler's choices among ways that are all right: an order of loops, a merge of two, a
smaller index type. Where code is right only if the answer is, it asks the extent itself, which makes a guard of what is
not proven.
"""

from __future__ import annotations

import math

from autodiff.extents.extent import Dim, Extent
from autodiff.extents.polynomial import Terms, divide

__all__ = ["at_most", "below", "content", "divides", "same"]


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
    """The largest number that divides a value, which is not 0, for all sizes, as far as its terms tell."""
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
