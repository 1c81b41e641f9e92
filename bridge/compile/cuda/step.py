"""Vector steps: a vector of a pass over the row → loads, a loop over its lanes, stores, in one thread.

Aligned vectors are loaded and stored as a whole; the code checks alignment unless the plan implies it. Arithmetic is
scalar, lane by lane.

Masks vector by vector: a recomputed dropout mask whose lanes share one call of the generator → that call, once. A
thread of eager's kernel that loads four or eight elements uses one call's four numbers for four adjacent elements, as
does attention's, with one sequence of numbers. So does our thread if its vectors begin at multiples of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, Stmt, Var

from autodiff.ir import compute_type, itemsize
from bridge.compile.codegen.philox import IN_A_ROW, NUMBERS, is_kept, numbers_of, place
from bridge.compile.codegen.pointwise import MASKS, combine
from bridge.compile.codegen.tir import LaunchArguments, sequence
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer, storage_type, vector_at
from bridge.compile.cuda.limits import ACCESS_BYTES
from bridge.compile.loop_ir.operations import Access
from bridge.compile.schedule.row_plan import (
    Compute,
    Index,
    InputElement,
    KernelBuffers,
    PassStep,
    RowPass,
    RowPlan,
    RowValues,
)

__all__ = ["RowBuffer", "ThreadScope", "ThreadStep", "column_steps", "drawn_vector", "is_at_multiples"]


@dataclass(frozen=True)
class RowBuffer:
    """A thread's values for each of its elements of a row.

    Attributes:
        buffer: the thread's own array; or memory of all rows or tasks.
        base: index of the row's first element in memory; ``None``: the thread's own array, in the order of its turns.
    """

    buffer: Buffer
    base: Expr | None = None

    def at(self, slot: Expr, position: Expr) -> Expr:
        """Index of the thread's ``slot``-th element, which is at ``position`` of the row."""
        return slot if self.base is None else self.base + position


class ThreadScope(RowValues):
    """Emission state of one row in one thread.

    Attributes:
        leads: whether the thread stores the row's own results.
        valid: whether the row exists, and is no repetition for an idle group; ``None``: always.
        cached: elementwise values cached for later passes, by node.
        partial: partials of column reductions, by node.
    """

    head: CudaEmitter

    def __init__(self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, leads: Expr) -> None:
        super().__init__(plan, buffers, number, CudaEmitter())
        self.leads = leads
        self.valid: Expr | None = None
        self.cached: dict[int, RowBuffer] = {}
        self.partial: dict[int, RowBuffer] = {}

    def store_scalar(self, store: Stmt) -> None:
        alone = self.leads if self.valid is None else tirx.And(self.leads, self.valid)
        self.head.stmts.append(IfThenElse(alone, store, None))

    def if_valid(self, stmt: Stmt) -> Stmt:
        """Guards a statement against repetitions of a row."""
        return stmt if self.valid is None else IfThenElse(self.valid, stmt, None)


def is_at_multiples(access: Access, count: int) -> bool:
    """Whether vectors of ``count`` elements are known to begin at multiples of ``count``."""
    known = [access.offset, *(term.stride for term in access.terms), *access.columns[:-1]]
    return all(isinstance(each, int) and each % count == 0 for each in known)


def drawn_vector(step: ThreadStep, node: Compute) -> Expr | None:
    """Whether this lane's element is kept; ``None`` if the node is no mask, or each lane needs a call of its own."""
    width = MASKS.get(node.op, 1)
    if (width < NUMBERS and width != IN_A_ROW) or step.lanes % NUMBERS or node.per_row:
        return None
    index, *others = node.operands
    if index.access.columns[-1] != 1 or not is_at_multiples(index.access, NUMBERS):
        return None
    e = step.before

    def read(operand: InputElement | Index) -> Expr:
        return step.scope.load_scalar(operand)

    seed, offset, threads, least = step.scope.values(others, e, read)
    words: Buffer
    words, allocation = local_buffer(step.lanes, "uint32", "words")
    e.stmts.append(allocation)
    begin, index_type = step.first(index.access), str(step.lane.ty)
    for first in range(0, step.lanes, NUMBERS):
        call, thread, _ = place(e, width, begin + tirx.const(first, index_type), threads)
        for lane, number in enumerate(numbers_of(e, seed, offset, call, thread)):
            e.stmts.append(BufferStore(words, number, [tirx.const(first + lane, index_type)]))
    return step.e.bind(is_kept(width, BufferLoad(words, [step.lane]), step.e.cast(least, "uint32")))


class ThreadStep(PassStep):
    """One step of a pass.

    Args:
        index: of the pass.
        lanes: elements of the vector.
        position: of the first element in the row.
        slot: of the first element among the thread's elements of the row.
        at: coordinate in each loop over the columns; in the last loop, the first lane's.
        sections: see :meth:`~bridge.compile.schedule.row_plan.RowValues.compute`.
        accumulators: of the row reductions, with one element per lane.
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
        super().__init__(scope, index, CudaEmitter(), at, sections)
        self.lanes, self.position, self.slot, self.accumulators = lanes, position, slot, accumulators
        self.lane: Expr = Var("lane", scope.plan.index_type) if lanes > 1 else scope.number(0)
        self.before = CudaEmitter()
        self.after: list[Stmt] = []

    def emit(self, row_pass: RowPass) -> list[Stmt]:
        """Statements of the step's stores, caches and accumulations."""
        e, scope, nodes = self.e, self.scope, self.plan.nodes
        for node in row_pass.stores:
            self._store(node, e.stored(self._value(node), nodes[node].dtype))
        for node in row_pass.cached:
            kept = scope.cached[node]
            e.stmts.append(BufferStore(kept.buffer, self._value(node), [self._kept(kept)]))
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

    def _load(self, read: InputElement) -> Expr:
        scope, access = self.scope, read.access
        if not any(access.columns):
            return scope.load_scalar(read)
        dtype = self.plan.dtype(read)
        index, number = self.first(access), scope.number
        buffer, step = scope.buffers.inputs[read.tensor], access.columns[-1]
        if step == 0:
            return self.before.bind(self.before.loaded(self.before.bind(BufferLoad(buffer, [index])), dtype))
        if step == 1 and self.lanes > 1:
            return self.e.bind(self.e.loaded(self._vector_of(read), dtype))
        element = BufferLoad(buffer, [index + self.lane * number(step) if self.lanes > 1 else index])
        # All loads, of elements as of vectors, come before computation: a quotient's branches would separate them.
        e = self.before if self.lanes == 1 else self.e
        return e.bind(e.loaded(e.bind(element), dtype))

    def _vector_of(self, read: InputElement) -> Expr:
        """The stored element of this lane, from a vector of adjacent elements."""
        buffer = self.scope.buffers.inputs[read.tensor]
        return self._load_vector(buffer, self.first(read.access), is_at_multiples(read.access, self._width(buffer)))

    def _index(self, access: Access) -> Expr:
        index, step = self.first(access), access.columns[-1]
        return index + self.lane * self.scope.number(step) if self.lanes > 1 and step != 0 else index

    def _width(self, buffer: Buffer) -> int:
        return min(self.lanes, ACCESS_BYTES // itemsize(str(buffer.dtype)))

    def _pieces(self, buffer: Buffer, index: Expr) -> list[tuple[list[Expr], list[Expr]]]:
        """Indices in memory and in the thread's array of each access.

        Written as multiples of the width: otherwise TVM loads element by element.
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
        """This lane's element of a vector in memory."""
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
        """Stores a value of every lane in the kernel's result, and the zeros after the row."""
        buffer, at = self.scope.buffers.outputs[node], self.scope.result(node, self.position)
        behind = self.scope.behind(node, buffer, self.position, self.lanes)
        if self.lanes == 1:
            self.e.stmts.append(self.scope.if_valid(sequence([BufferStore(buffer, value, [at]), *behind])))
            return
        if self.plan.nodes[node].behind % self._width(buffer):  # misaligned rows
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


def column_steps(
    scope: ThreadScope, index: int, lanes: int, position: Expr, slot: Expr, accumulators: dict[int, Buffer]
) -> list[Stmt]:
    """Statements of pass ``index`` for one vector; its per-row loads go to the head."""
    coordinates, e = _coordinates(scope, position)

    def inside(at: list[Expr], sections: list[int | None]) -> list[Stmt]:
        axis = len(at)
        if axis == len(coordinates):
            step = ThreadStep(scope, index, lanes, position, slot, at, sections, accumulators)
            return step.emit(scope.plan.passes[index])
        if axis == len(coordinates) - 1 or not scope.unrolled(axis):
            return inside([*at, coordinates[axis]], [*sections, None])
        chosen: Stmt | None = None
        for k in reversed(range(scope.plan.columns[axis])):
            here = sequence(inside([*at, scope.number(k)], [*sections, k]))
            chosen = here if chosen is None else IfThenElse(tirx.EQ(coordinates[axis], scope.number(k)), here, chosen)
        return [chosen]

    body = inside([], [])
    return [*e.stmts, *body]


def _coordinates(scope: ThreadScope, position: Expr) -> tuple[list[Expr], CudaEmitter]:
    """The coordinate in each loop over the columns, and the emitter that binds them."""
    e, number, columns = CudaEmitter(), scope.number, scope.plan.columns
    found: list[Expr] = []
    for axis in reversed(range(1, len(columns))):
        extent = number(columns[axis])
        found.append(e.name_index(tirx.truncmod(position, extent), f"c{axis}"))
        position = e.name_index(tirx.truncdiv(position, extent), "outer")
    return [position, *reversed(found)], e
