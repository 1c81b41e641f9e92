"""Errors of differentiation, each naming the operator and the binding."""

from __future__ import annotations

__all__ = ["NoGradient", "UndifferentiableOp"]


class NoGradient(Exception):
    """A gradient that was asked for cannot be computed exactly."""


class UndifferentiableOp(NoGradient):
    """An operator on the way from a wanted parameter to a differentiated output has no (such) gradient rule.

    ``op`` is the operator's name (``"relax.erf"``, ``"library.embedding"``), ``binding`` the variable it defines,
    ``why`` the reason; ``others`` are the further ones of the same function.
    """

    def __init__(self, op: str, binding: str, why: str):
        super().__init__(f"{op}, bound to {binding!r}: {why}")
        self.op = op
        self.binding = binding
        self.why = why
        self.others: tuple[UndifferentiableOp, ...] = ()
