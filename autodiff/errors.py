"""Errors of differentiation, each naming the operator and the binding."""

from __future__ import annotations


class NoGradient(Exception):
    """A gradient that was asked for cannot be computed exactly."""


class UndifferentiableOp(NoGradient):
    """An operator on the path from a required parameter to a differentiated output has no gradient rule for this call.

    ``op`` is the operator's name (``"relax.erf"``, ``"library.embedding"``), ``binding`` the variable it defines,
    ``why`` the reason; ``others`` are the function's other errors of this kind.
    """

    def __init__(self, op: str, binding: str, why: str):
        super().__init__(f"{op}, bound to {binding!r}: {why}")
        self.op = op
        self.binding = binding
        self.why = why
        self.others: tuple[UndifferentiableOp, ...] = ()


class UnknownShape(Exception):
    """The shape of an operator's result is not known for operands with symbolic extents.

    ``op`` is the operator's name, ``why`` the known facts.
    """

    def __init__(self, op: str, why: str):
        super().__init__(f"{op}: {why}")
        self.op = op
        self.why = why
