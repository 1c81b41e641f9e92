"""Neutral nodes: what translation leaves open, to be chosen by :mod:`bridge.compile.passes.choose_layouts`.

A *neutral graph* says what is computed, not where it lies: every operand reads all of a value, perhaps under broadcast,
and shape operations, matrix products and concatenations are nodes of their own, with dense results. Choosing layouts
turns shape operations into views, products into library calls or generated code, and leaves none of these nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bridge.compile.loop_ir.graph import OneOperand, OneOut, Operand, Scalar, Value
from bridge.compile.loop_ir.views import View, permute

__all__ = ["Dense", "Join", "MatMul", "Neutral", "Result", "Shaped", "is_turned"]


@dataclass(frozen=True, eq=False)
class Shaped(OneOperand, OneOut):
    """``out`` has the elements of ``function(view, *arguments)`` of the operand's view.

    ``function`` is :func:`~bridge.compile.loop_ir.views.permute`, ``expand``, ``slice_view`` or ``reshape``, whose
    ``None`` calls for a copy.
    """

    function: Callable[..., View | None]
    arguments: tuple
    operand: Operand
    out: Value


@dataclass(frozen=True, eq=False)
class Dense(OneOperand, OneOut):
    """``out`` has the operand's elements, one after another in memory, for a kernel that reads no views."""

    operand: Operand
    out: Value


@dataclass(frozen=True, eq=False)
class Result(OneOperand, OneOut):
    """``out`` is a result of the function: a value of its own, or a parameter itself."""

    operand: Operand | Scalar
    out: Value


@dataclass(frozen=True, eq=False)
class MatMul(OneOut):
    """``out = a @ b`` by numpy's rules for vectors and batches; operands and result have one element type.

    ``bias``: what is added to each row of a product of matrices, before it is rounded.
    """

    a: Operand
    b: Operand
    out: Value
    bias: Operand | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self.a, self.b) if self.bias is None else (self.a, self.b, self.bias)


@dataclass(frozen=True, eq=False)
class Join(OneOut):
    """``out`` is the concatenation of the operands along ``axis``."""

    operands: tuple[Operand | Scalar, ...]
    axis: int
    out: Value


Neutral = Shaped | Dense | Result | MatMul | Join


def is_turned(node: Shaped) -> bool:
    """Whether a node makes the transpose of a matrix that lies in memory by rows."""
    is_reversed = node.arguments in (((1, 0),), (None,)) and len(node.out.shape) == 2
    return node.function is permute and is_reversed and node.operand.is_whole
