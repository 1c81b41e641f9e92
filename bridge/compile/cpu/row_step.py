"""Vector step: one vector (or scalar) of a pass over the row → loads, arithmetic, stores and accumulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, Stmt

from bridge.compile.codegen.emit import Emitter
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.cpu.row_scope import RowScope
from bridge.compile.loop_ir.graph import Operand, Reduction, Value
from bridge.compile.schedule.reduction import combine
from bridge.compile.schedule.row_plan import RowPass

__all__ = ["Accumulators", "Step"]

Accumulators = Mapping[tuple[Reduction, int], Buffer]
"""Of each row reduction and number of lanes, the buffer that it is accumulated in."""


class Step:
    """One step of a pass.

    Args:
        index: of the pass.
        at: the step's coordinate in each loop over the columns; of its first lane in the last one.
        sections: see :meth:`RowScope.compute`.
        copy: which of the row reductions' parallel accumulators this step adds to.
    """

    def __init__(
        self,
        scope: RowScope,
        index: int,
        lanes: int,
        at: Sequence[Expr],
        sections: Sequence[int | None],
        accumulators: Accumulators,
        copy: int,
    ) -> None:
        self.scope = scope
        self.plan = scope.plan
        self.index = index
        self.e = Emitter(lanes)
        self.at = at
        self.sections = sections
        self.accumulators = accumulators
        self.copy = copy
        self._values: dict[Value, Expr] = {}
        self._loads: dict[tuple, Expr] = {}
        position: Expr = scope.const(0)
        for extent, coordinate in zip(scope.extents, at, strict=True):
            position = position * scope.const(extent) + coordinate
        self.position = position  # of the first lane, in the row

    def emit(self, row_pass: RowPass) -> list[Stmt]:
        """Statements that store, cache and accumulate what the pass has to."""
        e, scope = self.e, self.scope
        for value in row_pass.stores:
            index = e.index(scope.element(self.position), 1)
            e.stmts.append(BufferStore(scope.buffers.flat[value], e.cast(self._value(value), value.dtype), [index]))
        for value in row_pass.cached:
            buffer = scope.row_buffers[value]
            e.stmts.append(BufferStore(buffer, self._value(value), [e.index(self.position, 1)]))
        for node in row_pass.reductions:
            operand = e.cast(self._read(node.operand), compute_type(node.out.dtype))
            if node.inner == 1:
                buffer = self.accumulators[node, e.lanes]
                at = e.index(scope.const(self.copy * e.lanes), 1)
            else:
                buffer = scope.buffers.partial[node]
                at = e.index(scope.task * scope.const(self.plan.columns) + self.position, 1)
            old = e.bind(BufferLoad(buffer, [at]))
            e.stmts.append(BufferStore(buffer, combine(e, node.op, old, operand), [at]))
        return e.stmts

    def _value(self, value: Value) -> Expr:
        """A member's elementwise value at this step."""
        if value not in self._values:
            self._values[value] = self._compute(value)
        return self._values[value]

    def _compute(self, value: Value) -> Expr:
        if self.plan.level(value) < self.index:
            if value in self.scope.row_buffers:
                return self.e.bind(BufferLoad(self.scope.row_buffers[value], [self.e.index(self.position, 1)]))
            if value in self.plan.stored:
                index = self.scope.element(self.position)
                load = BufferLoad(self.scope.buffers.flat[value], [self.e.index(index, 1)])
                return self.e.bind(self.e.cast(load, compute_type(value.dtype)))
        return self.scope.compute(self.plan.group.made[value], self.e, self._read, self.sections)

    def _read(self, operand: Operand) -> Expr:
        """An operand at this step, in its compute type."""
        if operand.value in self.scope.scalars:
            return self.e.broadcast(self.scope.scalars[operand.value])
        if operand.value in self.plan.group.made:
            return self._value(operand.value)
        key = (operand.value, operand.view)
        if key not in self._loads:
            self._loads[key] = self._load(operand)
        return self._loads[key]

    def _load(self, operand: Operand) -> Expr:
        e, view = self.e, operand.view
        _, strides = self.plan.space.strides(view)
        if not any(strides):
            return e.broadcast(self.scope.load_scalar(operand, 1))
        index = self.scope.base(view, 1)
        for coordinate, stride in zip(self.at, strides, strict=True):
            if stride:
                index = index + coordinate * self.scope.const(stride)
        buffer = self.scope.buffers.flat[operand.value]
        if strides[-1] == 0 and e.lanes > 1:
            scalar = BufferLoad(buffer, [index])
            return e.bind(e.cast(e.broadcast(scalar), compute_type(operand.dtype)))
        load = BufferLoad(buffer, [e.index(index, strides[-1])])
        return e.bind(e.cast(load, compute_type(operand.dtype)))
