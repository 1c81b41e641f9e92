"""Expressions of sizes: sympy's, as torch makes them → extents; conditions on sizes → answers of their scope.

Floating point enters only where Python rounds a quotient or a multiple by a power of two to an integer
(``int(n * 0.5)``, ``math.ceil(n / 3)``): exact below 2**52, where float64 has the quotient on the right side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from autodiff.extents import Dim, maximum, minimum

__all__ = ["NotTranslatedError", "equal_symbols", "extent_of", "holds"]


class NotTranslatedError(ValueError):
    """An expression of sizes that extents do not have."""

    def __init__(self, expr: Any):
        super().__init__(f"{expr} ({type(expr).__name__})")


def extent_of(expr: Any, symbols: Mapping[Any, Dim]) -> Dim:
    """The integer expression ``expr`` with extents for its symbols. :class:`NotTranslatedError` if it is none."""
    if expr.is_Integer:
        return int(expr)
    if expr in symbols:
        return symbols[expr]
    kind = type(expr).__name__
    if kind in ("FloorToInt", "TruncToInt", "CeilToInt"):
        return _rounded(expr.args[0], symbols, up=kind == "CeilToInt")
    make = _INTEGERS.get(kind)
    if make is None:
        raise NotTranslatedError(expr)
    if kind in ("Pow", "PowByNatural") and not (expr.args[1].is_Integer and expr.args[1] >= 0):
        raise NotTranslatedError(expr)
    return make(*(extent_of(arg, symbols) for arg in expr.args))


def holds(expr: Any, symbols: Mapping[Any, Dim]) -> bool:
    """Whether a condition holds: for all sizes in range, or for the sample, and then the scope of the extents has it
    among its guards. :class:`NotTranslatedError` as above.
    """
    kind = type(expr).__name__
    if kind in ("BooleanTrue", "BooleanFalse"):
        return kind == "BooleanTrue"
    if kind == "Not":
        return not holds(expr.args[0], symbols)
    if kind == "And":
        return all(holds(arg, symbols) for arg in expr.args)
    if kind == "Or":  # the first that the sample has: a stronger condition
        return any(holds(arg, symbols) for arg in expr.args)
    if kind not in _RELATIONS:
        raise NotTranslatedError(expr)
    a, b = (extent_of(arg, symbols) for arg in expr.args)
    return bool(_RELATIONS[kind](a, b))


def equal_symbols(
    dims: Sequence[tuple[str, Any]], conditions: Iterable[Any], samples: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Symbols that need no extent of their own → the expression of others that each is equal to.

    One symbol takes the place of all for a name; the other side of an equation, that of a symbol. What is only equal as
    a product (``a * b == c * d``) is made equal by its factors, those of one size in the sample: fewer calls fit, and
    all passes can tell that they are equal.

    Args:
        dims: name and expression of each dimension.
        conditions: what was concluded.
        samples: values of the symbols in the sample.
    """
    found: dict[Any, Any] = {}

    def put(symbol: Any, expr: Any) -> None:
        for known in found:
            found[known] = found[known].xreplace({symbol: expr})
        found[symbol] = expr

    first: dict[str, Any] = {}
    for name, expr in dims:
        expr = expr.xreplace(found)
        if expr.is_Symbol and first.setdefault(name, expr) != expr:
            put(expr, first[name].xreplace(found))
    for condition in conditions:
        if type(condition).__name__ != "Equality":
            continue
        a, b = (arg.xreplace(found) for arg in condition.args)
        for symbol, other in ((a, b), (b, a)):
            if symbol.is_Symbol and symbol not in other.free_symbols and symbol not in found:
                put(symbol, other)
                break
        else:
            _pair(a, b, samples, put)
    return found


def _pair(a: Any, b: Any, samples: Mapping[Any, Any], put: Callable[[Any, Any], None]) -> None:
    """Makes factors of one size equal where the sides of an equation are then the same."""
    ours, theirs = (sorted(x.free_symbols - y.free_symbols, key=str) for x, y in ((a, b), (b, a)))
    pairs = {}
    for symbol in ours:
        fit = next((other for other in theirs if samples[other] == samples[symbol]), None)
        if fit is not None:
            theirs.remove(fit)
            pairs[symbol] = fit
    if pairs and a.xreplace(pairs) == b:
        for symbol, other in pairs.items():
            put(symbol, other)


def _rounded(expr: Any, symbols: Mapping[Any, Dim], *, up: bool) -> Dim:
    """A quotient, or a multiple by a power of two or its inverse, rounded to an integer."""
    numerator, divisor = _fraction(expr, symbols)
    return -((-numerator) // divisor) if up else numerator // divisor


def _fraction(expr: Any, symbols: Mapping[Any, Dim]) -> tuple[Dim, Dim]:
    kind = type(expr).__name__
    if kind == "IntTrueDiv":
        a, b = (extent_of(arg, symbols) for arg in expr.args)
        return (a, b) if a >= 0 and b > 0 else _refuse(expr)
    if kind == "ToFloat":
        a = extent_of(expr.args[0], symbols)
        return (a, 1) if a >= 0 else _refuse(expr)
    if expr.is_Float:
        numerator, divisor = float(expr).as_integer_ratio()
        return (numerator, divisor) if 0 <= numerator < 2**20 and divisor < 2**20 else _refuse(expr)
    if kind == "Mul" and all(type(arg).__name__ == "ToFloat" or arg.is_Float for arg in expr.args):
        parts = [_fraction(arg, symbols) for arg in expr.args]
        return reduce(_product, (part for part, _ in parts)), reduce(_product, (part for _, part in parts))
    return _refuse(expr)


def _refuse(expr: Any) -> Any:
    raise NotTranslatedError(expr)


def _product(a: Dim, b: Dim) -> Dim:
    return a * b


_INTEGERS: dict[str, Callable[..., Dim]] = {
    "Add": lambda *terms: sum(terms[1:], terms[0]),
    "Mul": lambda *factors: reduce(_product, factors),
    "Pow": lambda base, exponent: reduce(_product, [base] * int(exponent), 1),
    "PowByNatural": lambda base, exponent: reduce(_product, [base] * int(exponent), 1),
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, divisor, modulus: a // divisor % modulus,
    "Max": lambda *args: reduce(maximum, args),
    "Min": lambda *args: reduce(minimum, args),
    "Identity": lambda a: a,
}

_RELATIONS: dict[str, Callable[[Dim, Dim], bool]] = {
    "Equality": lambda a, b: a == b,
    "Unequality": lambda a, b: a != b,
    "StrictLessThan": lambda a, b: a < b,
    "LessThan": lambda a, b: a <= b,
    "StrictGreaterThan": lambda a, b: a > b,
    "GreaterThan": lambda a, b: a >= b,
}
