"""Integer polynomials in normal form: terms over symbols and over quotients, remainders, maxima and minima of terms.

Equal terms are equal polynomials; the reverse holds for polynomials of symbols alone.

Guard: a condition on sizes under which a decision made for the sample holds; it prints.
Ranges: terms and the ranges of their symbols → an interval that holds the terms' value.
Terms -> integer expressions of TVM's IR; equal terms give equal expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import IntImm

from autodiff.lazy import cached_property


@dataclass(frozen=True)
class Symbol:
    """An integer that is known when a program is bound."""

    name: str

    @property
    def order(self) -> str:
        """The sort key of atoms."""
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
    """The value of constant terms, otherwise ``None``."""
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
    """All symbols in the terms, nested ones included."""
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


@dataclass(frozen=True)
class SizeGuard:
    """``terms >= 0``, ``terms == 0`` or ``terms != 0``; ``relation`` is ``">="``, ``"=="`` or ``"!="``."""

    terms: Terms
    relation: str

    def __str__(self) -> str:
        positive = [(monomial, factor) for monomial, factor in self.terms if factor > 0]
        negative = [(monomial, -factor) for monomial, factor in self.terms if factor < 0]
        return f"{text(tuple(positive))} {self.relation} {text(tuple(negative))}"

    def holds(self, value: int) -> bool:
        """Whether the relation holds for this value of the terms."""
        return value >= 0 if self.relation == ">=" else (value == 0) == (self.relation == "==")

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The symbols in the terms."""
        return symbols_of(self.terms)


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
    """Lower bound: each atom as its lower bound plus a non-negative rest; ``None`` if a rest has a negative factor."""
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


_OPERATORS: dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]] = {
    "//": tirx.FloorDiv,
    "%": tirx.FloorMod,
    "max": tirx.Max,
    "min": tirx.Min,
}


def to_tir(terms: Terms, var: Callable[[Symbol], tirx.Var]) -> tirx.Expr:
    """The integer expression of terms; ``var`` gives the variable of a symbol."""
    total: tirx.Expr | None = None
    for monomial, factor in reversed(terms):
        product: tirx.Expr | None = None
        for atom in monomial:
            if isinstance(atom, Symbol):
                part = var(atom)
            else:
                part = _OPERATORS[atom.kind](to_tir(atom.a, var), to_tir(atom.b, var))
            product = part if product is None else tirx.Mul(product, part)
        number = IntImm("int64", factor)
        if product is None:
            product = number
        elif factor != 1:
            product = tirx.Mul(product, number)
        total = product if total is None else tirx.Add(total, product)
    return IntImm("int64", 0) if total is None else total
