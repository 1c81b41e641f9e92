"""Vector step: one vector of a pass over the row → loads, a loop of its lanes, stores, in one thread.

Vectors are loaded and stored as a whole where they lie at a multiple of their size, which the code asks wherever the
plan does not say it; arithmetic is scalar, lane by lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import compute_type
from bridge.compile.codegen.tir import sequence
from bridge.compile.cuda.ahead import first_pass
from bridge.compile.cuda.drawn_vector import drawn_vector, is_at_multiples
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer, storage_type, vector_at
from bridge.compile.cuda.limits import ACCESS_BYTES
from bridge.compile.cuda.scope import ThreadScope
from bridge.compile.loop_ir.operations import Access
from bridge.compile.schedule.reduction import combine
from bridge.compile.schedule.row_plan import Index, Made, Read, RowPass

__all__ = ["Step"]


class Step:
    """One step of a pass.

    Args:
        index: of the pass.
        lanes: elements of the vector.
        position: of the first one in the row.
        slot: its place among the elements of the row that the thread meets.
        at: coordinate in each loop over the columns; of the first lane in the last one.
        sections: see :meth:`~bridge.compile.schedule.row_plan.RowValues.compute`.
        accumulators: of the row reductions, a lane each.
    """

    def __init__(
        self,
        scope: ThreadScope,
        index: int,
        lanes: int,
        position: Expr,
        slot: Expr,
        at: Sequence[Expr],
        sections: Sequence[int | None],
        accumulators: dict[int, Buffer],
    ) -> None:
        self.scope, self.plan, self.index, self.lanes = scope, scope.plan, index, lanes
        self.position, self.slot, self.at, self.sections = position, slot, at, sections
        self.accumulators = accumulators
        self.lane: Expr = Var("lane", scope.plan.index_type) if lanes > 1 else scope.number(0)
        self.before = CudaEmitter()
        self.e = CudaEmitter()
        self.after: list[Stmt] = []
        self._values: dict[int, Expr] = {}
        self._loads: dict[Read, Expr] = {}

    def emit(self, row_pass: RowPass) -> list[Stmt]:
        """Statements that store, keep and accumulate what the pass has to."""
        e, scope, nodes = self.e, self.scope, self.plan.nodes
        for node in row_pass.stores:
            self._store(node, e.stored(self._value(node), nodes[node].dtype))
        for node in row_pass.cached:
            kept = scope.cached[node]
            e.stmts.append(BufferStore(kept.buffer, self._value(node), [self._kept(kept)]))
        if self.index == first_pass(self.plan):
            for read, kept in scope.ahead.items():
                e.stmts.append(BufferStore(kept.buffer, self._vector_of(read), [self._kept(kept)]))
        for node in row_pass.reductions:
            value = e.cast(self._read(nodes[node].operands[0]), compute_type(nodes[node].dtype))
            row = nodes[node].reduces == "row"
            buffer = self.accumulators[node] if row else scope.partial[node].buffer
            place = self.lane if row else self._kept(scope.partial[node])
            value, inside = e.bind(value), CudaEmitter()
            added = combine(inside, nodes[node].op, BufferLoad(buffer, [place]), value)
            store = sequence([*inside.stmts, BufferStore(buffer, added, [place])])
            e.stmts.append(store if row else scope.if_valid(store))
        return [*self.before.stmts, *self._lanes(e.stmts), *self.after]

    def _lanes(self, stmts: Sequence[Stmt]) -> list[Stmt]:
        if self.lanes == 1:
            return list(stmts)
        number = self.scope.number
        return [For(self.lane, number(0), number(self.lanes), ForKind.UNROLLED, sequence(stmts))]

    def _kept(self, kept) -> Expr:
        return kept.at(self.slot, self.position) + self.lane if self.lanes > 1 else kept.at(self.slot, self.position)

    def _value(self, node: int) -> Expr:
        """A node's elementwise value in this lane."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: int) -> Expr:
        e, scope = self.e, self.scope
        if self.plan.levels[node] < self.index:
            if node in scope.cached:
                kept = scope.cached[node]
                return e.bind(BufferLoad(kept.buffer, [self._kept(kept)]))
            if node in scope.buffers.outputs:
                at, dtype = scope.element(self.position), self.plan.nodes[node].dtype
                return e.bind(e.loaded(self._load_vector(scope.buffers.outputs[node], at, True), dtype))
        mask = drawn_vector(self, self.plan.nodes[node])
        return scope.compute(self.plan.nodes[node], e, self._read, self.sections) if mask is None else mask

    def _read(self, operand: Read | Index | Made) -> Expr:
        """An operand in this lane, in its compute type."""
        if isinstance(operand, Index):
            return self._index(operand.access)
        if isinstance(operand, Made):
            known = self.scope.scalars.get(operand.node)
            return self._value(operand.node) if known is None else known
        if operand not in self._loads:
            self._loads[operand] = self._load(operand)
        return self._loads[operand]

    def _load(self, read: Read) -> Expr:
        scope, access = self.scope, read.access
        if not any(access.columns):
            return scope.load_scalar(read)
        dtype = self.plan.dtype(read)
        if read in scope.ahead and self.index > first_pass(self.plan):
            kept = scope.ahead[read]
            return self.e.bind(self.e.loaded(BufferLoad(kept.buffer, [self._kept(kept)]), dtype))
        index, number = self.first(access), scope.number
        buffer, step = scope.buffers.inputs[read.tensor], access.columns[-1]
        if step == 0:
            return self.before.bind(self.before.loaded(self.before.bind(BufferLoad(buffer, [index])), dtype))
        if step == 1 and self.lanes > 1:
            return self.e.bind(self.e.loaded(self._vector_of(read), dtype))
        element = BufferLoad(buffer, [index + self.lane * number(step) if self.lanes > 1 else index])
        # Elements, like vectors, are all asked for before anything is computed: a quotient's branches would part them.
        e = self.before if self.lanes == 1 else self.e
        return e.bind(e.loaded(e.bind(element), dtype))

    def _vector_of(self, read: Read) -> Expr:
        """The stored element of this lane of a vector, whose elements are neighbours."""
        buffer = self.scope.buffers.inputs[read.tensor]
        return self._load_vector(buffer, self.first(read.access), is_at_multiples(read.access, self._width(buffer)))

    def first(self, access: Access) -> Expr:
        """Index of the first lane's element."""
        index, number = self.scope.base(access), self.scope.number
        for coordinate, stride in zip(self.at, access.columns, strict=True):
            if stride:
                index = index + coordinate * number(stride)
        return index

    def _index(self, access: Access) -> Expr:
        """Index of this lane's element."""
        index, step = self.first(access), access.columns[-1]
        return index + self.lane * self.scope.number(step) if self.lanes > 1 and step != 0 else index

    def _width(self, buffer: Buffer) -> int:
        """Elements of one access."""
        return min(self.lanes, ACCESS_BYTES // itemsize(str(buffer.dtype)))

    def _pieces(self, buffer: Buffer, index: Expr) -> list[tuple[list[Expr], list[Expr]]]:
        """Indices in memory and in the thread's array of each access.

        They are written as multiples of the width: TVM loads element by element what it does not see to be one.
        """
        number, width = self.scope.number, self._width(buffer)
        if width > 1:
            shift = number(width.bit_length() - 1)
            index = self.before.name_index(tirx.shift_right(index, shift), "whole") * number(width)
        return [
            tuple([vector_at(b + number(first), width)] for b in (index, number(0)))
            for first in range(0, self.lanes, width)
        ]

    def _load_vector(self, buffer: Buffer, index: Expr, proven: bool) -> Expr:
        """The element of this lane of a vector in memory."""
        before, number = self.before, self.scope.number
        if self.lanes == 1:
            return self.e.bind(BufferLoad(buffer, [index]))
        local, allocation = local_buffer(self.lanes, str(buffer.dtype), "x")
        index = before.name_index(index, "at")
        whole = sequence(
            [BufferStore(local, BufferLoad(buffer, there), here) for there, here in self._pieces(buffer, index)]
        )
        if not proven:
            k = Var("k", self.plan.index_type)
            single = BufferStore(local, BufferLoad(buffer, [index + k]), [k])
            each = For(k, number(0), number(self.lanes), ForKind.UNROLLED, single)
            aligned = tirx.EQ(tirx.bitwise_and(index, number(self._width(buffer) - 1)), number(0))
            whole = IfThenElse(aligned, whole, each)
        before.stmts += [allocation, whole]
        return BufferLoad(local, [self.lane])

    def _store(self, node: int, value: Expr) -> None:
        """Stores a value of every lane in the kernel's result, and the zeros behind the row."""
        buffer, at = self.scope.buffers.outputs[node], self.scope.result(node, self.position)
        behind = self.scope.behind(node, buffer, self.position, self.lanes)
        if self.lanes == 1:
            self.e.stmts.append(self.scope.if_valid(sequence([BufferStore(buffer, value, [at]), *behind])))
            return
        if self.plan.nodes[node].behind % self._width(buffer):  # rows begin anywhere
            at = self.before.name_index(at, "at")
            self.e.stmts.append(self.scope.if_valid(BufferStore(buffer, value, [at + self.lane])))
            self.after += [self.scope.if_valid(each) for each in behind]
            return
        local, allocation = local_buffer(self.lanes, storage_type(self.plan.nodes[node].dtype), "y")
        self.before.stmts.append(allocation)
        self.e.stmts.append(BufferStore(local, value, [self.lane]))
        at = self.before.name_index(at, "at")
        stores = [BufferStore(buffer, BufferLoad(local, here), there) for there, here in self._pieces(buffer, at)]
        self.after.append(self.scope.if_valid(sequence([*stores, *behind])))
