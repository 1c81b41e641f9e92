"""Integer polynomials in normal form: terms over symbols and over quotients, remainders, maxima and minima of terms.

Equal terms are equal polynomials; the reverse holds for polynomials of symbols alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "Atom",
    "Composite",
    "Monomial",
    "Symbol",
    "Terms",
    "add",
    "constant",
    "divide",
    "multiply",
    "normal",
    "symbols_of",
    "text",
]


@dataclass(frozen=True)
class Symbol:
    """An integer that is known when a program is bound."""

    name: str

    @cached_property
    def order(self) -> str:
        """By which atoms are sorted."""
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Composite:
    """``a // b``, ``a % b`` (rounding down, as in Python), ``max(a, b)`` or ``min(a, b)``."""

    kind: str
    a: Terms
    b: Terms

    @cached_property
    def order(self) -> str:
        return str(self)

    def __hash__(self) -> int:
        return hash(self.order)  # a string keeps its hash, and terms are looked up often

    def __str__(self) -> str:
        return _atom(self, str)


Atom = Symbol | Composite
Monomial = tuple[Atom, ...]
"""A product of atoms, sorted; ``()`` is 1."""
Terms = tuple[tuple[Monomial, int], ...]
"""A sum of monomials with their factors, none of them 0, sorted."""


def normal(sums: Mapping[Monomial, int]) -> Terms:
    """The terms of a sum."""
    left = [(monomial, factor) for monomial, factor in sums.items() if factor]
    if len(left) < 2:
        return tuple(left)
    return tuple(sorted(left, key=lambda term: _order(term[0])))


def _order(monomial: Monomial) -> tuple[int, list[str]]:
    return len(monomial), [atom.order for atom in monomial]


def constant(terms: Terms) -> int | None:
    """The number that the terms are, ``None`` if they are not one."""
    if not terms:
        return 0
    return terms[0][1] if len(terms) == 1 and not terms[0][0] else None


def add(a: Terms, b: Terms, factor: int = 1) -> Terms:
    """``a + factor * b``."""
    if not b:
        return a
    sums = dict(a)
    for monomial, each in b:
        sums[monomial] = sums.get(monomial, 0) + factor * each
    return normal(sums)


def multiply(a: Terms, b: Terms) -> Terms:
    """``a * b``."""
    for one, other in ((a, b), (b, a)):
        if len(one) == 1 and not one[0][0]:
            number = one[0][1]
            return other if number == 1 else tuple([(monomial, number * each) for monomial, each in other])
    sums: dict[Monomial, int] = {}
    for left, one in a:
        for right, other in b:
            monomial = tuple(sorted(left + right, key=lambda atom: atom.order))
            sums[monomial] = sums.get(monomial, 0) + one * other
    return normal(sums)


def divide(a: Terms, b: Terms) -> tuple[Terms, Terms]:
    """``(q, r)`` with ``a == q * b + r``; ``r`` is empty if ``b`` divides ``a`` as a polynomial."""
    quotient: Terms = ()
    remainder: dict[Monomial, int] = {}
    lead, factor = b[-1]
    while a:
        monomial, each = a[-1]
        left = _without(monomial, lead)
        if left is None or each % factor:
            remainder[monomial] = each
            a = a[:-1]
            continue
        part: Terms = ((left, each // factor),)
        quotient, a = add(quotient, part), add(a, multiply(part, b), -1)
    return quotient, normal(remainder)


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def symbols_of(terms: Terms) -> frozenset[Symbol]:
    """All symbols that the value of terms depends on."""
    found: set[Symbol] = set()
    for monomial, _ in terms:
        for atom in monomial:
            found |= {atom} if isinstance(atom, Symbol) else symbols_of(atom.a) | symbols_of(atom.b)
    return frozenset(found)


def text(terms: Terms, name: Callable[[Symbol], str] = str) -> str:
    """Terms as a Python expression."""
    written = []
    for monomial, factor in reversed(terms):
        parts = [_atom(atom, name) for atom in monomial]
        written.append("*".join([*([str(factor)] if factor != 1 or not parts else []), *parts]))
    return " + ".join(written).replace("+ -", "- ") or "0"


def _atom(atom: Atom, name: Callable[[Symbol], str]) -> str:
    if isinstance(atom, Symbol):
        return name(atom)
    a, b = text(atom.a, name), text(atom.b, name)
    return f"{atom.kind}({a}, {b})" if atom.kind in ("max", "min") else f"(({a}) {atom.kind} ({b}))"
