"""Terms as integer expressions of TVM's IR, spelled in one way: equal terms are equal expressions."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx import IntImm

from autodiff.extents.polynomial import Symbol, Terms

__all__ = ["to_tir"]

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
