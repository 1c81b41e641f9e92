"""Placed values: operands under shape operations → views of what is stored, or copies where none expresses it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autodiff.extents import Dim
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Node, Operand, Pointwise, Scalar, Value, whole

__all__ = ["Placed"]


class Placed:
    """The nodes of a graph under construction, with the copies among them: equal ones are made once.

    Attributes:
        nodes: in order.
        name: that of values made now.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.name = "t"
        self._copies: dict[Hashable, Operand] = {}

    def fresh(self, extents: Sequence[Dim], element_type: str) -> Value:
        """A value to be a node's result."""
        return Value(self.name, tuple(extents), element_type)

    def pointwise_copy(self, operand: Operand | Scalar) -> Operand:
        """The operand's elements in order, in a value that nothing else shares."""
        return self._add_copy(operand, self.fresh(operand.shape, operand.dtype))

    def copy(self, operand: Operand | Scalar, out: Value | None = None) -> Operand:
        """The operand's elements in order; ``out`` is the value that holds them if they are not there yet."""
        key = (operand, str(operand.number)) if isinstance(operand, Scalar) else operand  # 0.0 equals -0.0
        if key not in self._copies:
            self._copies[key] = self._add_copy(operand, out or self.fresh(operand.shape, operand.dtype))
        return self._copies[key]

    def copied(self, operand: Operand | Scalar) -> Operand | None:
        """The copy of an operand's elements in order, if one was made."""
        return self._copies.get(operand) if isinstance(operand, Operand) else None

    def _add_copy(self, operand: Operand | Scalar, out: Value) -> Operand:
        self.nodes.append(Pointwise("copy", (operand,), out))
        return whole(out)

    def dense(self, operand: Operand | Scalar) -> Operand:
        """A value of its own that holds the operand's elements in order, unless it already is one."""
        return operand if is_all_of_a_value(operand) else self.copy(operand)

    def expand(self, operand: Operand, extents: Sequence[Dim]) -> Operand:
        return Operand(operand.value, views.expand(operand.view, extents))

    def reshape(self, operand: Operand, extents: Sequence[Dim]) -> Operand:
        view = views.reshape(operand.view, extents)
        if view is not None:
            return Operand(operand.value, view)
        return Operand(self.copy(operand).value, views.dense(extents))


def is_all_of_a_value(operand: Operand | Scalar) -> bool:
    """Whether the operand reads all elements of a value in the order in which they lie."""
    return isinstance(operand, Operand) and operand.is_whole
