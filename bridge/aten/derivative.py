"""Derivatives as torch writes them down: a value and a function linear in the inputs → the value, with its gradient.

The chain rule through the operators that make a value multiplies in another order than torch's backward formula. Where
a factor is infinite or zero, or where digits cancel, the two differ; there the formula is spelled out.
"""

from __future__ import annotations

from tvm import relax

from autodiff.ir import Expr, dtype
from autodiff.library import call as library_call

__all__ = ["scaled", "times", "where", "with_derivative", "with_slope"]

op = relax.op


def with_derivative(importer, value: Expr, linear: Expr) -> Expr:
    """``value`` with the gradient of ``linear``, of the same type; what only ``linear`` reads is never computed."""
    value, linear = importer.emit(op.grad.no_grad(value)), importer.emit(linear)
    return importer.emit(library_call("with_derivative", [value, linear], value.ty))


def with_slope(importer, value: Expr, x: Expr, slope: Expr) -> Expr:
    """``value`` with the gradient ``g * slope`` with respect to ``x``."""
    return with_derivative(importer, value, times(importer, x, slope))


def times(importer, x: Expr, slope: Expr) -> Expr:
    """A term of a linear function of ``x``: its product with a slope that has no gradient of its own."""
    return importer.emit(op.multiply(x, importer.emit(op.grad.no_grad(importer.emit(slope)))))


def where(importer, condition: Expr, x: Expr, y: Expr) -> Expr:
    """A selection, emitted."""
    return importer.emit(op.where(importer.emit(condition), importer.emit(x), importer.emit(y)))


def scaled(importer, x: Expr, factor: float) -> Expr:
    """``x`` times a number; itself for 1."""
    return x if factor == 1 else importer.emit(op.multiply(x, importer.constant(factor, dtype(x))))
