"""Symbolic extents: integers that are known when a program is bound, and that Python code handles as numbers.

An :class:`Extent` computes like an integer. A question about it (equal, larger, divisible?) is answered for all sizes
in its range if the answer can be proven. Otherwise it is answered for the sample and becomes a *guard*: the code made
on the way is right for the sizes that satisfy every guard of the scope. ``int(extent)`` guards the sample's value.
A decision that only concerns speed takes :func:`sample_of` instead, which guards nothing.

Scopes as data: a scope ↔ its symbols and guards as frozen values, for a file or another process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import IntImm

from autodiff.extents.polynomial import (
    Composite,
    Range,
    SizeGuard,
    Symbol,
    Terms,
    add,
    constant,
    divide,
    multiply,
    range_of,
    symbols_of,
    text,
    to_tir,
)


class ExtentScope:
    """The symbols of one lowering, and the guards on them.

    Attributes:
        samples: symbol -> the extent in the lowered call.
        ranges: symbol -> its range.
        guards: conditions that were answered for the sample alone, in order.
        assumed: a new object for each :meth:`assuming`, to mark the code made within; ``None`` outside.
    """

    def __init__(self) -> None:
        self.samples: dict[Symbol, int] = {}
        self.ranges: dict[Symbol, Range] = {}
        self.assumed: object = None
        self._guards: dict[SizeGuard, None] = {}
        self._vars: dict[Symbol, tirx.Var] = {}
        self._bounds: dict[Terms, Range] = {}

    def symbol(self, name: str, sample: int, low: int = 2, high: int | None = None) -> Extent:
        """A new extent between ``low`` and ``high``. ``ValueError`` for a name twice or a sample out of range."""
        symbol = Symbol(name)
        if symbol in self.samples:
            raise ValueError(f"extent {name!r}: there is one already")
        if sample < low or (high is not None and sample > high):
            raise ValueError(f"extent {name!r}: wanted a sample from {low} to {high}, got {sample}")
        self.samples[symbol], self.ranges[symbol] = sample, Range(low, high)
        var = self._vars[symbol] = tirx.Var(name, "int64")
        extent = Extent(self, (((symbol,), 1),))
        _SYMBOL_OF[var.__chandle__()] = (weakref.ref(self), symbol)
        weakref.finalize(self, _SYMBOL_OF.pop, var.__chandle__(), None)
        return extent

    def narrow(self, symbol: Symbol, low: int, high: int | None) -> None:
        """Intersects a symbol's range with ``low`` to ``high``."""
        known = self.ranges[symbol]
        highs = [bound for bound in (high, known.high) if bound is not None]
        self.ranges[symbol] = Range(low if known.low is None else max(low, known.low), min(highs, default=None))
        self._bounds.clear()

    @property
    def guards(self) -> tuple[SizeGuard, ...]:
        return tuple(self._guards)

    def var(self, symbol: Symbol) -> tirx.Var:
        """The variable that stands for a symbol in TVM's IR."""
        return self._vars[symbol]

    def make(self, terms: Terms) -> Dim:
        """The extent of terms; an ``int`` if they are constant."""
        number = constant(terms)
        return Extent(self, terms) if number is None else number

    def range_of(self, value: Dim) -> Range:
        """Bounds of a value for all values of the symbols."""
        return self.bounds(value.terms) if isinstance(value, Extent) else Range(value, value)

    def bounds(self, terms: Terms) -> Range:
        """Bounds of terms, cached."""
        found = self._bounds.get(terms)
        if found is None:
            found = self._bounds[terms] = range_of(terms, self.ranges)
        return found

    def value(self, value: Dim, sizes: Mapping[str, int]) -> int:
        """A value for the given sizes, by the symbols' names."""
        return self.compiled([value])(sizes)[0]

    def compiled(self, values: Sequence[Dim]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
        """A compiled function: sizes by the symbols' names -> all values."""
        names = {symbol: f"d{index}" for index, symbol in enumerate(self.samples)}
        written = [text(v.terms, names.__getitem__) if isinstance(v, Extent) else str(int(v)) for v in values]
        code = f"lambda {', '.join(names.values())}: ({''.join(f'{each}, ' for each in written)})"
        function = eval(code, {"max": max, "min": min, "__builtins__": {}})
        order = [symbol.name for symbol in names]
        return lambda sizes: function(*[sizes[name] for name in order])

    @contextmanager
    def assuming(self, sizes: Mapping[str, int]) -> Iterator[Mapping[SizeGuard, None]]:
        """Answers for these sizes instead of the sample's, for code made later in a call of these sizes.

        Answers that hold for these sizes alone become guards in the yielded mapping, not guards of the scope.
        """
        before = self.samples, self._guards, self.assumed
        self.samples, self._guards = {symbol: sizes[symbol.name] for symbol in self.samples}, {}
        self.assumed = object()
        try:
            yield self._guards
        finally:
            self.samples, self._guards, self.assumed = before

    def broken(self, guards: Iterable[SizeGuard] | None = None) -> Callable[[Mapping[str, int]], SizeGuard | None]:
        """A function of sizes by name: the first guard, the scope's or others, that does not hold, or ``None``.

        Checks the ranges first, and a guard that excludes a divisor of 0 before guards that divide by it.
        """
        ranges: list[SizeGuard] = []
        for symbol, bounds in self.ranges.items():
            own: Terms = (((symbol,), 1),)
            ranges += [SizeGuard(add(own, _number(bounds.low), -1), ">=")] if bounds.low is not None else []
            ranges += [SizeGuard(add(_number(bounds.high), own, -1), ">=")] if bounds.high is not None else []
        guards = (*ranges, *(self.guards if guards is None else guards))
        values = self.compiled([self.make(guard.terms) for guard in guards])

        def first_broken(sizes: Mapping[str, int]) -> SizeGuard | None:
            try:
                found = values(sizes)
            except ZeroDivisionError:
                return next(guard for guard in guards if not guard.holds(self.value(self.make(guard.terms), sizes)))
            return next((guard for guard, value in zip(guards, found, strict=True) if not guard.holds(value)), None)

        return first_broken

    def is_zero(self, terms: Terms) -> bool:
        """Whether terms are 0; adds a guard if the answer is not the same in the whole range."""
        bounds = self.bounds(terms)
        if bounds.low == bounds.high == 0 or not terms:
            return True
        if (bounds.low is not None and bounds.low > 0) or (bounds.high is not None and bounds.high < 0):
            return False
        found = self._sample(terms) == 0
        self._guards[SizeGuard(terms, "==" if found else "!=")] = None
        return found

    def is_negative(self, terms: Terms) -> bool:
        """Whether terms are below 0; adds a guard if the answer is not the same in the whole range."""
        bounds = self.bounds(terms)
        if bounds.low is not None and bounds.low >= 0:
            return False
        if bounds.high is not None and bounds.high < 0:
            return True
        found = self._sample(terms) < 0
        guarded = add(_number(-1), terms, -1) if found else terms
        self._guards[SizeGuard(guarded, ">=")] = None
        return found

    def _sample(self, terms: Terms) -> int:
        total = 0
        for monomial, factor in terms:
            for atom in monomial:
                is_symbol = isinstance(atom, Symbol)
                factor *= self.samples[atom] if is_symbol else _PLAIN[atom.kind](*map(self._sample, (atom.a, atom.b)))
            total += factor
        return total


_PLAIN: dict[str, Callable[[int, int], int]] = {
    "max": max,
    "min": min,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


class Extent:
    """An integer that depends on a scope's symbols; never one with the same value for all sizes. Immutable."""

    __slots__ = ("_hash", "scope", "terms")

    def __init__(self, scope: ExtentScope, terms: Terms):
        self.scope, self.terms = scope, terms
        self._hash = hash(terms)

    @property
    def sample(self) -> int:
        """The value in the lowered call; guards nothing."""
        return self.scope._sample(self.terms)

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The symbols that it depends on."""
        return symbols_of(self.terms)

    @property
    def linear(self) -> tuple[Symbol, int, int] | None:
        """``(symbol, factor, offset)`` if it is ``factor * symbol + offset`` with a positive factor."""
        terms = dict(self.terms)
        offset = terms.pop((), 0)
        ((monomial, factor), *others) = terms.items()
        if others or len(monomial) != 1 or not isinstance(monomial[0], Symbol) or factor < 0:
            return None
        return monomial[0], factor, offset

    def __add__(self, other: Dim) -> Dim:
        return self.scope.make(add(self.terms, terms)) if (terms := _terms(other)) is not None else NotImplemented

    def __sub__(self, other: Dim) -> Dim:
        return self.scope.make(add(self.terms, terms, -1)) if (terms := _terms(other)) is not None else NotImplemented

    def __rsub__(self, other: Dim) -> Dim:
        return self.scope.make(add(terms, self.terms, -1)) if (terms := _terms(other)) is not None else NotImplemented

    def __mul__(self, other: Dim) -> Dim:
        return self.scope.make(multiply(self.terms, terms)) if (terms := _terms(other)) is not None else NotImplemented

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Dim:
        return 0 - self

    def __pos__(self) -> Dim:
        return self

    def __floordiv__(self, other: Dim) -> Dim:
        return self._divided(self.terms, other, 0)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return self._divided(_terms(other), self, 0)

    def __mod__(self, other: Dim) -> Dim:
        return self._divided(self.terms, other, 1)

    def __rmod__(self, other: Dim) -> Dim:
        return self._divided(_terms(other), self, 1)

    def __divmod__(self, other: Dim) -> tuple[Dim, Dim]:
        return self // other, self % other

    def __rdivmod__(self, other: Dim) -> tuple[Dim, Dim]:
        return other // self, other % self

    def _divided(self, a: Terms | None, divisor: Dim, part: int) -> Dim:
        """The quotient rounded down (``part`` 0) or the remainder (``part`` 1)."""
        b = _terms(divisor)
        if a is None or b is None:
            return NotImplemented
        scope = self.scope
        if scope.is_zero(b):
            raise ZeroDivisionError(f"{text(a)} divided by {text(b)}, which is 0")
        quotient, left = divide(a, b)
        bounds, size = scope.bounds(left), scope.bounds(b)
        if bounds.low is not None and bounds.low >= 0 and size.low is not None and size.low > 0:
            below = scope.bounds(add(b, left, -1))
            if not left or (below.low is not None and below.low > 0):
                return scope.make((quotient, left)[part])
        if not left:
            return scope.make((quotient, left)[part])
        rest: Terms = (((Composite(("//", "%")[part], left, b),), 1),)  # a == quotient * b + left, for all sizes
        return scope.make(rest if part else add(quotient, rest))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        terms = _terms(other)
        if terms == self.terms:
            return True
        return NotImplemented if terms is None else self.scope.is_zero(add(self.terms, terms, -1))

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __lt__(self, other: Dim) -> bool:
        return self.scope.is_negative(add(self.terms, _terms(other), -1))

    def __ge__(self, other: Dim) -> bool:
        return not self < other

    def __gt__(self, other: Dim) -> bool:
        return self.scope.is_negative(add(_terms(other), self.terms, -1))

    def __le__(self, other: Dim) -> bool:
        return not self > other

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        return not self.scope.is_zero(self.terms)

    def __index__(self) -> int:
        """The sample's value, and a guard that fixes the extent to it."""
        number = self.sample
        self.scope.is_zero(add(self.terms, _number(number), -1))
        return number

    __int__ = __index__

    def __str__(self) -> str:
        return text(self.terms)

    __repr__ = __str__

    def __tvm_ffi_object__(self) -> tirx.Expr:
        """TVM's functions take an extent where they take an integer expression."""
        return to_tir(self.terms, self.scope.var)


Dim = int | Extent
"""A number, or an extent that is known when a program is bound."""

_SYMBOL_OF: dict[int, tuple[weakref.ref[ExtentScope], Symbol]] = {}


def sample_of(value: Dim) -> int:
    """A value in the lowered call: for decisions that concern speed and nothing else."""
    return value.sample if isinstance(value, Extent) else value


def maximum(a: Dim, b: Dim) -> Dim:
    """The larger one, for all sizes; Python's ``max`` would decide for the sample and add a guard."""
    return _either("max", a, b)


def minimum(a: Dim, b: Dim) -> Dim:
    """The smaller one, for all sizes."""
    return _either("min", a, b)


def _either(kind: str, a: Dim, b: Dim) -> Dim:
    owner = a if isinstance(a, Extent) else b
    if not isinstance(owner, Extent):
        return _PLAIN[kind](a, b)
    bounds = owner.scope.bounds(add(_terms(a), _terms(b), -1))
    if bounds.low is not None and bounds.low >= 0:
        return a if kind == "max" else b
    if bounds.high is not None and bounds.high <= 0:
        return b if kind == "max" else a
    return owner.scope.make((((Composite(kind, _terms(a), _terms(b)),), 1),))


def symbols_alive() -> bool:
    """Whether any scope has symbols; if none has, no shape needs a search for symbols."""
    return bool(_SYMBOL_OF)


def is_symbol(var: tirx.Var) -> bool:
    """Whether a variable of TVM's IR is a symbol of a living scope: an integer, not a value of a function."""
    return bool(_SYMBOL_OF) and var.__chandle__() in _SYMBOL_OF


def from_tir(expr: tirx.Expr) -> Dim:
    """The extent that TVM's integer expression stands for.

    ``ValueError`` for a variable of no living scope, and for operators that extents do not have.
    """
    if isinstance(expr, int):
        return expr
    if isinstance(expr, IntImm):
        return int(expr)
    if isinstance(expr, tirx.Var):
        reference, symbol = _SYMBOL_OF.get(expr.__chandle__(), (None, None))
        scope = reference() if reference is not None else None
        if scope is None or symbol is None:
            raise ValueError(f"wanted a variable of an extent, got {expr}")
        return Extent(scope, (((symbol,), 1),))
    if isinstance(expr, tirx.Cast):
        return from_tir(expr.value)
    combine = _FROM_TIR.get(type(expr))
    if combine is None:
        raise ValueError(f"wanted an extent, got {expr} ({type(expr).__name__})")
    return combine(from_tir(expr.a), from_tir(expr.b))


_FROM_TIR: dict[type, Callable[[Dim, Dim], Dim]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Max: maximum,
    tirx.Min: minimum,
}


def _terms(value: object) -> Terms | None:
    if isinstance(value, Extent):
        return value.terms
    return _number(int(value)) if isinstance(value, int) else None


def _number(number: int | None) -> Terms:
    return (((), number),) if number else ()


@dataclass(frozen=True)
class ScopeState:
    """A snapshot of a scope: ``(name, sample, low, high)`` of each symbol, and the guards."""

    symbols: tuple[tuple[str, int, int | None, int | None], ...]
    guards: tuple[SizeGuard, ...]


def state_of_scope(scope: ExtentScope) -> ScopeState:
    """A scope -> its snapshot."""
    symbols = ((symbol, scope.ranges[symbol], sample) for symbol, sample in scope.samples.items())
    return ScopeState(
        tuple((symbol.name, sample, bounds.low, bounds.high) for symbol, bounds, sample in symbols), scope.guards
    )


def scope_of_state(state: ScopeState) -> ExtentScope:
    """A snapshot -> a new scope with the same symbols and guards."""
    scope = ExtentScope()
    for name, sample, low, high in state.symbols:
        scope.symbol(name, sample, low, high)
    scope._guards.update(dict.fromkeys(state.guards))
    return scope
