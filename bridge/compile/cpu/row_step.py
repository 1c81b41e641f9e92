"""Vector step: one vector (or scalar) of a pass over the row → loads, arithmetic, stores and accumulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, Shuffle, Stmt

from bridge.compile.codegen.emit import Emitter
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.cpu.row_scope import RowScope
from bridge.compile.loop_ir.access import Access
from bridge.compile.schedule.reduction import combine
from bridge.compile.schedule.row_plan import Index, Made, Read, RowPass

__all__ = ["Accumulators", "Step"]

Accumulators = Mapping[tuple[int, int], Buffer]
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
        self._values: dict[int, Expr] = {}
        self._loads: dict[Read, Expr] = {}
        position: Expr = scope.number(0)
        for extent, coordinate in zip(self.plan.columns, at, strict=True):
            position = position * scope.number(extent) + coordinate
        self.position = position  # of the first lane, in the row

    def emit(self, row_pass: RowPass) -> list[Stmt]:
        """Statements that store, cache and accumulate what the pass has to."""
        e, scope, nodes = self.e, self.scope, self.plan.nodes
        for node in row_pass.stores:
            if nodes[node].places:
                self._store_sections(node)
                continue
            buffer, index = scope.buffers.outputs[node], e.index(scope.result(node, self.position), 1)
            e.stmts.append(BufferStore(buffer, e.stored(self._value(node), nodes[node].dtype), [index]))
            e.stmts += scope.behind(node, buffer, self.position, e.lanes)
        for node in row_pass.cached:
            buffer = scope.row_buffers[node]
            at = scope.in_row_buffer(self.position)
            e.stmts.append(BufferStore(buffer, self._value(node), [e.index(at, 1)]))
        for node in row_pass.reductions:
            operand = e.cast(self._read(nodes[node].operands[0]), compute_type(nodes[node].dtype))
            if nodes[node].reduces == "row" and (node, e.lanes) not in self.accumulators:
                self._add_one_by_one(node, operand)
                continue
            if nodes[node].reduces == "row":
                buffer = self.accumulators[node, e.lanes]
                at = e.index(scope.number(self.copy * e.lanes), 1)
            else:
                buffer = scope.buffers.partial[node]
                at = e.index(scope.parts + self.position, 1)
            old = e.bind(BufferLoad(buffer, [at]))
            e.stmts.append(BufferStore(buffer, combine(e, nodes[node].op, old, operand), [at]))
        return e.stmts

    def _store_sections(self, index: int) -> None:
        node, e = self.plan.nodes[index], self.e
        values = self.scope.values(node.operands, e, self._read)
        for value, place in zip(values, node.places, strict=True):
            at, step = self._place(place)
            buffer, stored = self.scope.buffers.outputs[index], e.stored(value, node.dtype)
            e.stmts.append(BufferStore(buffer, stored, [e.index(at, step)]))

    def _add_one_by_one(self, node: int, operand: Expr) -> None:
        """A narrower vector's lanes: the columns behind the vectors, in order."""
        e, buffer, at = Emitter(1), self.accumulators[node, 1], self.scope.number(0)
        vector, total = self.e.bind(operand), e.bind(BufferLoad(buffer, [at]))
        for lane in range(self.e.lanes):
            total = e.bind(combine(e, self.plan.nodes[node].op, total, e.bind(Shuffle([vector], [lane]))))
        self.e.stmts += [*e.stmts, BufferStore(buffer, total, [at])]

    def _value(self, node: int) -> Expr:
        """A node's elementwise value at this step."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: int) -> Expr:
        e, scope = self.e, self.scope
        if self.plan.levels[node] < self.index:
            if node in scope.row_buffers:
                at = scope.in_row_buffer(self.position)
                return e.bind(BufferLoad(scope.row_buffers[node], [e.index(at, 1)]))
            if node in scope.buffers.outputs:
                load = BufferLoad(scope.buffers.outputs[node], [e.index(scope.element(self.position), 1)])
                return e.bind(e.cast(load, compute_type(self.plan.nodes[node].dtype)))
        return scope.compute(self.plan.nodes[node], e, self._read, self.sections)

    def _read(self, operand: Read | Index | Made) -> Expr:
        """An operand at this step, in its compute type."""
        if isinstance(operand, Index):
            return self._index(operand)
        if isinstance(operand, Made):
            if operand.node in self.scope.scalars:
                return self.e.broadcast(self.scope.scalars[operand.node])
            return self._value(operand.node)
        if operand not in self._loads:
            self._loads[operand] = self._load(operand)
        return self._loads[operand]

    def _load(self, read: Read) -> Expr:
        e, scope, strides = self.e, self.scope, read.access.columns
        if not any(strides):
            return e.broadcast(scope.load_scalar(read))
        dtype = compute_type(self.plan.dtype(read))
        index, step = self._place(read.access)
        buffer = scope.buffers.inputs[read.tensor]
        index = scope.place_of(read.tensor, index)
        if strides[-1] == 0 and e.lanes > 1:
            return e.bind(e.cast(e.broadcast(BufferLoad(buffer, [index])), dtype))
        return e.bind(e.cast(BufferLoad(buffer, [e.index(index, step)]), dtype))

    def _index(self, operand: Index) -> Expr:
        index, step = self._place(operand.access)
        return self.e.broadcast(index) if operand.access.columns[-1] == 0 else self.e.index(index, step)

    def _place(self, access: Access) -> tuple[Expr, Expr | int]:
        """Index of the first lane's element, and the step to the next one's."""
        index, number = self.scope.base(access), self.scope.number
        for coordinate, stride in zip(self.at, access.columns, strict=True):
            if stride:
                index = index + coordinate * number(stride)
        last = access.columns[-1]
        return index, last if isinstance(last, int) else number(last)
