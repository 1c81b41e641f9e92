"""Ranges: terms and the ranges of their symbols → an interval that holds the terms' value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autodiff.extents.polynomial import Atom, Monomial, Symbol, Terms, add, multiply

__all__ = ["Range", "range_of"]


@dataclass(frozen=True)
class Range:
    """All integers from ``low`` to ``high``, both included; ``None``: no bound."""

    low: int | None
    high: int | None


def range_of(terms: Terms, ranges: Mapping[Symbol, Range]) -> Range:
    """Bounds of a polynomial; not always the closest ones."""
    atoms = {atom: _range_of_atom(atom, ranges) for monomial, _ in terms for atom in monomial}
    low = _largest(_shifted_low(terms, atoms), _interval_low(terms, atoms))
    negated = add((), terms, -1)
    high = _largest(_shifted_low(negated, atoms), _interval_low(negated, atoms))
    return Range(low, None if high is None else -high)


def _largest(*bounds: int | None) -> int | None:
    return max((bound for bound in bounds if bound is not None), default=None)


def _shifted_low(terms: Terms, atoms: Mapping[Atom, Range]) -> int | None:
    """With every atom written as its lower bound plus something not negative, factors that are all positive."""
    if any(each.low is None for each in atoms.values()):
        return None
    total: Terms = ()
    for monomial, factor in terms:
        product: Terms = (((), factor),)
        for atom in monomial:
            low = atoms[atom].low
            product = multiply(product, (*((((), low),) if low else ()), ((atom,), 1)))
        total = add(total, product)
    return dict(total).get((), 0) if all(factor > 0 for monomial, factor in total if monomial) else None


def _interval_low(terms: Terms, atoms: Mapping[Atom, Range]) -> int | None:
    """The sum of the terms' own lower bounds."""
    total = 0
    for monomial, factor in terms:
        low, high = _product(monomial, atoms)
        bound = low if factor > 0 else high
        if bound is None:
            return None
        total += factor * bound
    return total


def _product(monomial: Monomial, atoms: Mapping[Atom, Range]) -> tuple[int | None, int | None]:
    low, high = 1, 1
    for atom in monomial:
        each = atoms[atom]
        if each.low is None or each.low < 0:
            return None, None
        low *= each.low
        high = None if high is None or each.high is None else high * each.high
    return low, high


def _range_of_atom(atom: Atom, ranges: Mapping[Symbol, Range]) -> Range:
    if isinstance(atom, Symbol):
        return ranges[atom]
    a, b = range_of(atom.a, ranges), range_of(atom.b, ranges)
    match atom.kind:
        case "max":
            return Range(_largest(a.low, b.low), None if a.high is None or b.high is None else max(a.high, b.high))
        case "min":
            lows = None if a.low is None or b.low is None else min(a.low, b.low)
            return Range(lows, min((high for high in (a.high, b.high) if high is not None), default=None))
        case "%":
            return Range(0, None if b.high is None else b.high - 1) if b.low is not None and b.low > 0 else _ANY
        case _:
            if a.low is None or a.low < 0 or b.low is None or b.low <= 0:
                return _ANY
            return Range(0 if b.high is None else a.low // b.high, None if a.high is None else a.high // b.low)


_ANY = Range(None, None)
