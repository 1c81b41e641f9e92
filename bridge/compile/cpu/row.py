"""Row kernels on the CPU: a row plan → the code of one row, in vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx
from tvm.tirx import Bind, Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, Shuffle, Stmt, Var

from autodiff.ir import compute_type
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.pointwise import combine, fold_lanes, identity
from bridge.compile.codegen.tir import LaunchArguments, rounded, sequence
from bridge.compile.loop_ir.operations import Access, Number
from bridge.compile.schedule.row_plan import InputElement, KernelBuffers, PassStep, RowPass, RowPlan, RowValues

__all__ = ["Accumulators", "RowScope", "VectorLoop", "VectorStep", "block_of", "emit_row", "in_blocks"]
__all__ += ["left_over", "narrowed", "vectors_and_tail"]

_NARROWEST = 4
"""Least number of lanes of a narrower vector for the columns after the vectors."""


@dataclass(frozen=True)
class VectorLoop:
    """A loop along the last columns: ``trips`` times ``copies`` steps of ``lanes`` lanes, from column ``first`` on."""

    lanes: int
    copies: int
    first: Expr
    trips: Expr


def block_of(number: LaunchArguments, rows: Expr, block: int) -> tuple[Expr, Expr]:
    """Rows of a block of column reductions, and whether a chunk has several (:mod:`bridge.compile.schedule.order`)."""
    several = tirx.And(number(2 * block) < rows, tirx.const(block > 0, "bool"))
    return tirx.Select(several, number(block), tirx.max(rows, number(1))), several


def in_blocks(
    number: LaunchArguments,
    count: Expr,
    size: Expr,
    inside: Var,
    body: Callable[[Expr], Stmt],
    before: Sequence[Stmt] = (),
    after: Sequence[Stmt] = (),
) -> Stmt:
    """``body(position)`` for ``count`` positions in blocks of ``size``; ``inside``: the position in a block."""
    block = Var("block", number.index_type)
    first = block * size
    turns = For(inside, number(0), tirx.min(size, count - first), ForKind.SERIAL, body(first + inside))
    blocks = tirx.truncdiv(count + size - number(1), size)
    return For(block, number(0), blocks, ForKind.SERIAL, sequence([*before, turns, *after]))


def vectors_and_tail(
    number: LaunchArguments, extent: Number, lanes: int, widths: Sequence[int]
) -> tuple[list[VectorLoop], list[VectorLoop]]:
    """For each of the widths, the loop over all vectors, ``width`` at a time; and the loop over the remaining columns.

    For a static extent, empty loops are left out.
    """
    if isinstance(extent, int):
        vectors, tail = divmod(extent, lanes)
        turns = [VectorLoop(lanes, width, number(0), number(vectors // width)) for width in widths if vectors]
        return turns, [VectorLoop(1, 1, number(extent - tail), number(tail))] if tail else []
    vectors = tirx.truncdiv(number(extent), number(lanes))
    whole = vectors * number(lanes)
    turns = [VectorLoop(lanes, width, number(0), tirx.truncdiv(vectors, number(width))) for width in widths]
    return turns, [VectorLoop(1, 1, whole, number(extent) - whole)]


def narrowed(number: LaunchArguments, extent: Number, lanes: int, tail: Sequence[VectorLoop]) -> list[VectorLoop]:
    """The columns after the vectors, as one narrower vector and single columns: an attention over 328 columns takes a
    seventh less time than with the last 8 one by one."""
    left = extent % lanes if isinstance(extent, int) else 0
    width = 1 << max(left.bit_length() - 1, 0)
    if width < _NARROWEST:
        return list(tail)
    first = extent - left
    narrow = VectorLoop(width, 1, number(first), number(1))
    return [narrow, VectorLoop(1, 1, number(first + width), number(left - width))] if left > width else [narrow]


def left_over(number: LaunchArguments, extent: Number, lanes: int, width: int) -> list[VectorLoop]:
    """The loop over the vectors that ``width`` at a time leaves over; empty for a static extent."""
    if isinstance(extent, int) or width == 1:
        return []
    vectors = tirx.truncdiv(number(extent), number(lanes))
    left = tirx.truncmod(vectors, number(width))
    return [VectorLoop(lanes, 1, (vectors - left) * number(lanes), left)]


class RowScope(RowValues):
    """Emission state of one row.

    Attributes:
        task: index of the row's task.
        parts: index of the task's row of partials of column reductions.
        tail: whether the row is the elements after the vectors of a flat space.
        row_buffers: elementwise values cached for later passes, by node.
        allocations: of the row's buffers.
    """

    def __init__(
        self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, task: Expr, *, tail: bool = False
    ) -> None:
        super().__init__(plan, buffers, number, Emitter(1))
        self.task = task
        self.parts: Expr = task * number(plan.length)
        self.tail = tail
        self.allocations: list[Stmt] = []
        self.row_buffers = dict(buffers.cached)
        for node in plan.cached:
            if node not in self.row_buffers:
                self.row_buffers[node] = self.allocate(plan.length, compute_type(plan.nodes[node].dtype), "cached")

    def allocate(self, size: int, dtype: str, name: str) -> Buffer:
        """A buffer on the stack."""
        buffer, allocation = stack_buffer(size, dtype, f"{name}{len(self.allocations)}")
        self.allocations.append(allocation)
        return buffer

    def in_row_buffer(self, position: Expr) -> Expr:
        """Index in a row buffer of the element at ``position`` of the row."""
        row = self.plan.buffer_row
        return position if row is None else self.task * self.number(row) + position


Accumulators = Mapping[tuple[int, int], Buffer]
"""(row reduction, number of lanes) → its accumulator."""


class VectorStep(PassStep):
    """One step of a pass.

    Args:
        index: of the pass.
        at: the step's coordinate in each loop over the columns; in the last loop, its first lane's.
        sections: see :meth:`RowScope.compute`.
        copy: index among the row reductions' parallel accumulators.
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
        super().__init__(scope, index, Emitter(lanes), at, sections)
        self.accumulators = accumulators
        self.copy = copy
        position: Expr = scope.number(0)
        for extent, coordinate in zip(self.plan.columns, at, strict=True):
            position = position * scope.number(extent) + coordinate
        self.position = position  # of the first lane, in the row

    def emit(self, row_pass: RowPass) -> list[Stmt]:
        """Statements of the step's stores, caches and accumulations."""
        e, scope, nodes = self.e, self.scope, self.plan.nodes
        for node in row_pass.stores:
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

    def _add_one_by_one(self, node: int, operand: Expr) -> None:
        """Accumulates the lanes of a narrower vector, the columns after the vectors, in order."""
        e, buffer, at = Emitter(1), self.accumulators[node, 1], self.scope.number(0)
        vector, total = self.e.bind(operand), e.bind(BufferLoad(buffer, [at]))
        for lane in range(self.e.lanes):
            total = e.bind(combine(e, self.plan.nodes[node].op, total, e.bind(Shuffle([vector], [lane]))))
        self.e.stmts += [*e.stmts, BufferStore(buffer, total, [at])]

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

    def _load(self, read: InputElement) -> Expr:
        e, scope, strides = self.e, self.scope, read.access.columns
        if not any(strides):
            return e.broadcast(scope.load_scalar(read))
        dtype = compute_type(self.plan.dtype(read))
        index, step = self._place(read.access)
        buffer = scope.buffers.inputs[read.tensor]
        if strides[-1] == 0 and e.lanes > 1:
            return e.bind(e.cast(e.broadcast(BufferLoad(buffer, [index])), dtype))
        return e.bind(e.cast(BufferLoad(buffer, [e.index(index, step)]), dtype))

    def _index(self, access: Access) -> Expr:
        index, step = self._place(access)
        return self.e.broadcast(index) if access.columns[-1] == 0 else self.e.index(index, step)

    def _place(self, access: Access) -> tuple[Expr, Expr | int]:
        """Index of the first lane's element, and the step from lane to lane."""
        last = access.columns[-1]
        return self.first(access), last if isinstance(last, int) else self.scope.number(last)


def emit_row(scope: RowScope, row: Expr) -> Stmt:
    """The code of a row; adds the row's buffers to ``scope.allocations``."""
    return sequence(scope.code(row, partial(_pass, scope)))


def _pass(scope: RowScope, index: int, row_pass: RowPass) -> list[Stmt]:
    rows = [node for node in row_pass.reductions if scope.plan.nodes[node].reduces == "row"]
    widths = scope.plan.accumulators if rows else (1,)
    possible, tail = _steps(scope, widths)
    start, accumulators = _accumulators(scope, rows, [*possible, *tail])
    blocks = Blocks(scope, rows, accumulators) if rows and scope.plan.walk.block_turns and possible else None

    def along(part: VectorLoop, outer: list[Expr], sections: list[int | None]) -> Stmt:
        i, steps = Var("i", scope.plan.index_type), []
        for copy in range(part.copies):
            at = (i * scope.number(part.copies) + scope.number(copy)) * scope.number(part.lanes)
            place = [*outer, part.first + at]
            steps.append(VectorStep(scope, index, part.lanes, place, sections, accumulators, copy))
        body = [stmt for step in steps for stmt in step.emit(row_pass)]
        if blocks is not None and part in possible:
            return blocks.loop(part, i, body, steps[0].position)
        return For(i, scope.number(0), part.trips, ForKind.SERIAL, sequence(body))

    def vectors(outer: list[Expr], sections: list[int | None]) -> list[Stmt]:
        loops = _first_that_divides(scope, widths, [along(part, outer, sections) for part in possible])
        return [*loops, *(along(part, outer, sections) for part in tail)]

    loops = sequence(_column_loops(scope, [], [], vectors))
    hoisted = scope.taken()  # per-row loads of the steps
    for node in rows:
        _finish(scope, node, accumulators if blocks is None else blocks.totals, max(widths))
    return [*start, *(blocks.start if blocks else ()), *hoisted, loops, *(blocks.end if blocks else ()), *scope.taken()]


class Blocks:
    """Blocks of a row's turns (:mod:`bridge.compile.schedule.order`): accumulators → totals over the blocks.

    Attributes:
        totals: the accumulators with totals in place of the vectors'.
        start: statements before the row. ``end``: after it; they add a last block of fewer turns.
    """

    def __init__(self, scope: RowScope, rows: Sequence[int], accumulators: Accumulators) -> None:
        self._scope, self._rows, self._accumulators = scope, rows, accumulators
        lanes, widest = scope.plan.lanes, max(scope.plan.accumulators)
        dtypes = {node: compute_type(scope.plan.nodes[node].dtype) for node in rows}
        self.totals = {**accumulators, **{(n, lanes): scope.allocate(lanes * widest, dtypes[n], "total") for n in rows}}
        self.start = [each for copy in range(widest) for each in self._filled(self.totals, copy)]
        is_left = len(scope.plan.columns) > 1
        self.end = [each for copy in range(widest if is_left else 0) for each in self._added(copy)]

    def loop(self, part: VectorLoop, i: Var, body: list[Stmt], position: Expr) -> Stmt:
        """The turns of a loop over the last columns; ``position``: of a turn's first element in the row."""
        scope, number = self._scope, self._scope.number
        added = [each for copy in range(part.copies) for each in self._added(copy)]
        if len(scope.plan.columns) > 1:
            turn = number(part.copies * part.lanes)
            size, _ = block_of(number, tirx.truncdiv(number(scope.plan.length), turn), scope.plan.walk.block_turns)
            is_last = tirx.EQ(tirx.truncmod(tirx.truncdiv(position, turn) + number(1), size), number(0))
            step = sequence([*body, IfThenElse(is_last, sequence(added), None)])
            return For(i, number(0), part.trips, ForKind.SERIAL, step)
        size, _ = block_of(number, part.trips, scope.plan.walk.block_turns)
        inside = Var("inside", scope.plan.index_type)
        return in_blocks(number, part.trips, size, inside, lambda at: sequence([Bind(i, at), *body]), after=added)

    def _added(self, copy: int) -> list[Stmt]:
        """Adds one vector of the accumulators to its total, and clears it."""
        stmts: list[Stmt] = []
        for node in self._rows:
            e, key = Emitter(self._scope.plan.lanes), (node, self._scope.plan.lanes)
            slot = [e.index(self._scope.number(copy * e.lanes), 1)]
            total, part = (e.bind(BufferLoad(each[key], slot)) for each in (self.totals, self._accumulators))
            stored = BufferStore(self.totals[key], combine(e, self._scope.plan.nodes[node].op, total, part), slot)
            stmts += [*e.stmts, stored]
        return [*stmts, *self._filled(self._accumulators, copy)]

    def _filled(self, buffers: Accumulators, copy: int) -> list[Stmt]:
        """Fills one vector of the reductions' buffers with their identities."""
        lanes = self._scope.plan.lanes
        return [_cleared(self._scope, node, buffers[node, lanes], lanes, copy) for node in self._rows]


def _cleared(scope: RowScope, node: int, buffer: Buffer, lanes: int, copy: int) -> Stmt:
    """Stores a reduction's identity in one vector of a buffer."""
    e, dtype = Emitter(lanes), str(buffer.dtype)
    first = e.const(identity(scope.plan.nodes[node].op, dtype), dtype)
    return BufferStore(buffer, first, [e.index(scope.number(copy * lanes), 1)])


def _steps(scope: RowScope, widths: Sequence[int]) -> tuple[list[VectorLoop], list[VectorLoop]]:
    """The vector loops of each possible width, and the scalar tail. The last row of a flat space may have fewer
    vectors, and its tail is a row of its own."""
    number, walk, last = scope.number, scope.plan.walk, scope.plan.columns[-1]
    wide = scope.plan.lanes
    if scope.tail:
        first, count = map(number, walk.tail)
        return [], [VectorLoop(1, 1, first, count)]
    if walk.vectors is not None:
        vectors = number(last // wide)
        left = number(walk.vectors) - scope.row * vectors
        return [VectorLoop(wide, 1, number(0), scope.head.name_index(tirx.min(left, vectors), "vectors"))], []
    turns, tail = vectors_and_tail(number, last, wide, widths)
    return turns, narrowed(number, last, wide, tail)


def _first_that_divides(scope: RowScope, widths: Sequence[int], loops: Sequence[Stmt]) -> list[Stmt]:
    """The loop of the first width that divides the vectors of the row, or the last loop."""
    if len(loops) < 2:
        return list(loops)
    number = scope.number
    vectors = tirx.truncdiv(number(scope.plan.length), number(scope.plan.lanes))
    *others, chosen = loops
    for width, each in reversed(list(zip(widths, others, strict=False))):
        chosen = IfThenElse(tirx.EQ(tirx.truncmod(vectors, number(width)), number(0)), each, chosen)
    return [chosen]


def _accumulators(scope: RowScope, rows: Sequence[int], steps: Sequence[VectorLoop]) -> tuple[list[Stmt], Accumulators]:
    """Accumulators of the row reductions, and their initialization with the reductions' identities."""
    start: list[Stmt] = []
    accumulators: dict[tuple[int, int], Buffer] = {}
    most: dict[int, int] = {}  # number of lanes → vectors
    for part in steps:
        lanes = part.lanes if part.lanes == scope.plan.lanes else 1
        most[lanes] = max(part.copies, most.get(lanes, 0))
    for index in rows:
        node = scope.plan.nodes[index]
        dtype = compute_type(node.dtype)
        for lanes, copies in most.items():
            buffer = accumulators[index, lanes] = scope.allocate(lanes * copies, dtype, "acc")
            start += [_cleared(scope, index, buffer, lanes, copy) for copy in range(copies)]
    return start, accumulators


def _column_loops(
    scope: RowScope,
    at: list[Expr],
    sections: list[int | None],
    body: Callable[[list[Expr], list[int | None]], list[Stmt]],
) -> list[Stmt]:
    """Loops over all column extents except the last; unrolls loops over the sections of a concatenation."""
    axis, columns = len(at), scope.plan.columns
    if axis == len(columns) - 1:
        return body(at, sections)
    if scope.unrolled(axis):
        unrolled = []
        for k in range(columns[axis]):
            unrolled += _column_loops(scope, [*at, scope.number(k)], [*sections, k], body)
        return unrolled
    var = Var(f"c{axis}", scope.plan.index_type)
    inside = sequence(_column_loops(scope, [*at, var], [*sections, None], body))
    return [For(var, scope.number(0), scope.number(columns[axis]), ForKind.SERIAL, inside)]


def _finish(scope: RowScope, index: int, accumulators: Accumulators, width: int) -> None:
    """Combines a row reduction's accumulators, in the order of :mod:`bridge.compile.schedule.order`.

    In a row of dynamic length, unused accumulators are identities, which change no bit: a sum from 0 is never -0.
    """
    head, node, total, lanes = scope.head, scope.plan.nodes[index], None, scope.plan.lanes
    if (index, lanes) in accumulators:
        e = Emitter(lanes)
        buffer = accumulators[index, lanes]
        parts = [e.bind(BufferLoad(buffer, [e.index(scope.number(k * lanes), 1)])) for k in range(width)]
        while len(parts) > 1:
            parts = [e.bind(combine(e, node.op, a, b)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        total = fold_lanes(e, node.op, parts[0])
        head.stmts += e.stmts
    if (index, 1) in accumulators:
        tail = head.bind(BufferLoad(accumulators[index, 1], [scope.number(0)]))
        total = tail if total is None else head.bind(combine(head, node.op, total, tail))
    scope.set_scalar(index, head.bind(rounded(head, total, node.dtype), "r"))
