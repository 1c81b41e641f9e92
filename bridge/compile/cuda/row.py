"""Row kernels on a GPU: a row plan with reductions → its launches.

Rows alone: a group of threads for each row. If columns are reduced as well, or a row's buffers are in scratch memory: a
block for each task, whose groups take the task's rows in turn; a second launch combines the tasks' partials of column
reductions, see :mod:`bridge.compile.cuda.columns`. For rows of dynamic length a launch chooses between two variants:
warps take short rows, and keep the values for later passes in registers.

Task partials: the groups' partials of a column reduction → the task's partial, in memory. The groups write their
numbers to shared memory; then each group takes whole vectors of columns, combines all groups' numbers by halves, and
stores the result. One thread combines a column, in an order that follows from the number of groups alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, Stmt, Var

from autodiff.ir import compute_type, itemsize
from bridge.compile.codegen.pointwise import EXPENSIVE, combine, identity
from bridge.compile.codegen.tir import LaunchArguments, rounded, sequence
from bridge.compile.cuda.build import fitting_groups, turns_together
from bridge.compile.cuda.columns import Team, second_stage_columns
from bridge.compile.cuda.emitter import (
    CudaEmitter,
    SharedMemory,
    launch,
    local_buffer,
    portions,
    synchronize,
    vector_at,
)
from bridge.compile.cuda.limits import ACCESS_BYTES, BLOCK_THREADS, VECTOR, WARP, row_groups, row_lanes, row_threads
from bridge.compile.cuda.step import RowBuffer, ThreadScope, column_steps
from bridge.compile.loop_ir.operations import Number
from bridge.compile.schedule.row_plan import KernelBuffers, RowPass, RowPlan

__all__ = ["SHORT_ROW", "RowVariant", "TaskPartials", "emit_row", "rows"]

_UNROLLED = 16
"""Maximum iterations of an unrolled loop over a row; unrolling keeps a thread's values in registers."""

_SHORT_TURNS = 8

_HELD = 64
"""Maximum numbers of columns in registers of a thread with wider vectors: two added batch normalizations have 88, which
would cost a multiprocessor a block of threads."""

_ENOUGH_BYTES = 96
"""Bytes of a row per thread: with as many, a block of one row keeps memory busy, and no row waits for another."""

SHORT_ROW = WARP * _SHORT_TURNS
"""Maximum elements of a row of dynamic length that a warp takes: each turn is code of its own, slow to compile."""


@dataclass(frozen=True)
class RowVariant:
    """The distribution of a row over a group of threads.

    Attributes:
        threads, groups: see :mod:`bridge.compile.cuda.limits`.
        lanes: of a vector.
        turns: maximum vectors of a thread; ``None`` for a dynamic length.
        tile: the one turn that this block takes; ``None``: all turns.
    """

    threads: int
    groups: int
    lanes: int
    turns: int | None
    tile: Expr | None = None

    @classmethod
    def of(cls, plan: RowPlan) -> RowVariant:
        last, length = plan.columns[-1], plan.length
        lanes = math.gcd(last, row_lanes(length, plan.small)) if isinstance(last, int) else 1
        threads = row_threads(length, plan.small)
        turns = -(-length // (threads * lanes)) if isinstance(length, int) else None
        groups = row_groups(length, plan.small, bool(plan.column_reductions))
        if turns is not None and not plan.column_reductions and _read_bytes(plan) * turns * lanes >= _ENOUGH_BYTES:
            groups = 1
        form = cls(threads, fitting_groups(plan, threads, groups, lanes), lanes, turns)
        return form.widened(plan) if combines_columns_alone(plan) else form

    def widened(self, plan: RowPlan) -> RowVariant:
        """The same groups with vectors of twice the lanes, if that is profitable; else this variant.

        All per-row operands must be half types, whose vectors then are accesses of :data:`ACCESS_BYTES`, and no more of
        a turn may exceed the row. Not with slow operators, which already keep the threads busy: with fewer vectors,
        fewer blocks share them. Not with many column values in registers across rows: then few threads would fit."""
        lanes, length = 2 * self.lanes, plan.length
        if self.lanes != VECTOR or not isinstance(length, int) or plan.columns[-1] % lanes or any(plan.concats):
            return self
        if any(node.op in EXPENSIVE for node in plan.nodes) or _of_columns(plan) * lanes >= _HELD:
            return self
        turns = -(-length // (self.threads * lanes))
        fits = fitting_groups(plan, self.threads, self.groups, lanes) == self.groups
        if not fits or turns * lanes > self.turns * self.lanes or _widest(plan) * lanes > ACCESS_BYTES:
            return self
        return replace(self, lanes=lanes, turns=turns)

    @classmethod
    def short(cls) -> RowVariant:
        """The variant for rows of dynamic length, at most :data:`SHORT_ROW`."""
        return cls(WARP, BLOCK_THREADS // WARP, 1, _SHORT_TURNS)

    @property
    def kept(self) -> int | None:
        """Maximum elements of a row for a thread."""
        if self.tile is not None:
            return self.lanes
        return None if self.turns is None else self.turns * self.lanes

    def of_tile(self, tile: Expr) -> RowVariant:
        """This variant with one turn per block."""
        return replace(self, tile=tile)

    def in_turns(self, number: LaunchArguments, body: Callable[[Expr, Expr], list[Stmt]]) -> Stmt:
        """``body(turn, slot)`` for the block's turns; ``slot``: number of the thread's first element in a turn."""
        if self.tile is not None:
            return sequence(body(self.tile, number(0)))
        turn = Var("turn", number.index_type)
        kind = ForKind.UNROLLED if self.turns <= _UNROLLED else ForKind.SERIAL
        return For(turn, number(0), number(self.turns), kind, sequence(body(turn, turn * number(self.lanes))))

    def loop(self, plan: RowPlan, number: LaunchArguments, thread: Expr, body) -> Stmt:
        """``body(emitter, position, slot)`` for the thread's vectors; ``slot``: number of the thread's element."""
        wide = self.threads * self.lanes

        def vector(turn: Expr, slot: Expr) -> list[Stmt]:
            e = CudaEmitter()
            position = e.name_index((turn * number(self.threads) + thread) * number(self.lanes), "position")
            inside = sequence(body(position, slot))
            if self.turns is None or self.turns * wide != plan.length:
                behind = number(plan.length) - turn * number(wide)
                inside = IfThenElse(thread * number(self.lanes) < behind, inside, None)
            return [*e.stmts, inside]

        if self.turns is not None or self.tile is not None:
            return self.in_turns(number, vector)
        turn = Var("turn", plan.index_type)
        inside = sequence(vector(turn, turn * number(self.lanes)))
        return For(turn, number(0), portions(number(plan.length), wide), ForKind.SERIAL, inside)


def combines_columns_alone(plan: RowPlan) -> bool:
    """Whether only columns are combined: no row reduction, no cached value, no stored per-row value. Each thread then
    computes the per-row values that it needs."""
    apart = plan.column_reductions and plan.buffer_row is None and not any(plan.cached)
    if not apart or any(node.reduces == "row" for node in plan.nodes):
        return False
    return not any(plan.nodes[node].per_row for node in plan.outputs)


def _of_columns(plan: RowPlan) -> int:
    """Registers for values of a column that are the same for all rows, or that accumulate it; float64 counts fourfold,
    because of its arithmetic's temporaries."""
    wide = sum(plan.nodes[node].dtype == "float64" for node in plan.column_reductions)
    held = len(plan.column_reductions) + 3 * wide
    return held + sum(any(each.access.columns) and not each.access.terms for each in plan.reads)


def _read_bytes(plan: RowPlan) -> int:
    """Bytes per element of a row that a thread reads, without operands that all rows share."""
    return sum(itemsize(plan.dtype(each)) for each in plan.reads if each.access.terms and any(each.access.columns))


def _widest(plan: RowPlan) -> int:
    """Maximum bytes of an element of per-row operands: results, and inputs with rows."""
    stored = [plan.nodes[node].dtype for node in plan.outputs if not plan.nodes[node].reduces]
    read = [plan.dtype(each) for each in plan.reads if each.access.terms]
    return max(map(itemsize, [*stored, *read]), default=VECTOR)


def emit_row(scope: ThreadScope, form: RowVariant, team: Team, row: Expr) -> list[Stmt]:
    """The code of one row; every thread of the group computes the per-row values."""
    return scope.code(row, partial(_pass, scope, form, team))


def _pass(scope: ThreadScope, form: RowVariant, team: Team, index: int, row_pass: RowPass) -> list[Stmt]:
    plan, number, head = scope.plan, scope.number, scope.head
    rows = [node for node in row_pass.reductions if plan.nodes[node].reduces == "row"]
    start: list[Stmt] = []
    accumulators: dict[int, Buffer] = {}
    for node in rows:
        dtype = compute_type(plan.nodes[node].dtype)
        buffer, allocation = local_buffer(form.lanes, dtype, "acc")
        first = head.const(identity(plan.nodes[node].op, dtype), dtype)
        start += [allocation, *(BufferStore(buffer, first, [number(k)]) for k in range(form.lanes))]
        accumulators[node] = buffer

    def vector(position: Expr, slot: Expr) -> list[Stmt]:
        return column_steps(scope, index, form.lanes, position, slot, accumulators)

    loop = form.loop(plan, number, team.thread, vector)
    hoisted = scope.taken()  # per-row loads of the steps
    parts = [
        (plan.nodes[node].op, str(buffer.dtype), _folded(scope, node, buffer)) for node, buffer in accumulators.items()
    ]
    for node, total in zip(rows, team.totals(head, parts), strict=True):
        scope.set_scalar(node, head.bind(rounded(head, total, plan.nodes[node].dtype), "r"))
    return [*start, *hoisted, loop, *scope.taken()]


def _folded(scope: ThreadScope, node: int, buffer: Buffer) -> Expr:
    """Combines a thread's lanes by halves."""
    head, op = scope.head, scope.plan.nodes[node].op
    lanes = [BufferLoad(buffer, [scope.number(k)]) for k in range(int(buffer.shape[0]))]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [head.bind(combine(head, op, a, b)) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


class TaskPartials:
    """Stores a block's partials.

    Args:
        form: of the rows, with a bounded number of turns.
        group, thread: indices in the block.
        task: index of the task's partial.
        length: elements of a row.
        together: turns whose partials fit in shared memory at once
            (:func:`bridge.compile.cuda.build.turns_together`).
    """

    def __init__(
        self,
        form: RowVariant,
        number: LaunchArguments,
        shared: SharedMemory,
        group: Expr,
        thread: Expr,
        task: Expr,
        length: Number,
        together: int,
    ) -> None:
        self.form, self.number, self.shared = form, number, shared
        self.group, self.thread = group, thread
        self.task, self.length, self.room = task, length, together
        self.turns = [(form.tile, 0)]
        if form.tile is None:
            self.turns = [(number(turn), turn) for turn in range(form.turns)]

    def stored(self, kept: Buffer, memory: Buffer, op: str) -> list[Stmt]:
        """Combines the threads' values in ``kept``, and stores them in ``memory``."""
        form, dtype = self.form, str(kept.dtype)
        width = min(form.lanes, ACCESS_BYTES // itemsize(dtype))
        if form.groups == 1:
            return [
                self._inside(turn, self._copies(kept, self._kept(index, width), memory, self._places(turn, width)))
                for turn, index in self.turns
            ]
        most, stmts = min(self.room, len(self.turns)), []
        for first in range(0, len(self.turns), most):
            stmts += self._together(kept, memory, op, self.turns[first : first + most], width, most)
        return stmts

    def _together(
        self, kept: Buffer, memory: Buffer, op: str, turns: list[tuple[Expr, int]], width: int, room: int
    ) -> list[Stmt]:
        """Stores the partials of some turns between the same barriers; shared memory has room for ``room`` turns."""
        form, number, dtype = self.form, self.number, str(kept.dtype)
        shared = self.shared(dtype, size=room * form.groups * form.threads * form.lanes)
        stmts: list[Stmt] = [synchronize()]
        for at, (_, index) in enumerate(turns):
            stmts += self._copies(kept, self._kept(index, width), shared, self._shared(number(at), self.group, width))
        stmts.append(synchronize())
        for first in range(0, len(turns), form.groups):
            some = len(turns) - first
            at = number(first) + self.group
            turn = turns[0][0] if len(turns) == 1 else turns[first][0] + self.group
            inside = self._inside(turn, self._combined(shared, memory, op, at, turn, width))
            stmts.append(inside if some >= form.groups else IfThenElse(self.group < number(some), inside, None))
        return stmts

    def _combined(self, shared: Buffer, memory: Buffer, op: str, at: Expr, turn: Expr, width: int) -> list[Stmt]:
        """Combines all groups' numbers of one turn by halves."""
        form, number, dtype, e = self.form, self.number, str(shared.dtype), CudaEmitter()
        locals_ = []
        for member in range(form.groups):
            local, allocation = local_buffer(form.lanes, dtype, "x")
            e.stmts.append(allocation)
            e.stmts += self._copies(shared, self._shared(at, number(member), width), local, self._kept(0, width))
            locals_.append(local)
        half = form.groups
        while half > 1:
            half //= 2
            for local, other in zip(locals_[:half], locals_[half : 2 * half], strict=True):
                for lane in range(form.lanes):
                    place = [number(lane)]
                    both = BufferLoad(local, place), BufferLoad(other, place)
                    e.stmts.append(BufferStore(local, combine(e, op, *both), place))
        return [*e.stmts, *self._copies(locals_[0], self._kept(0, width), memory, self._places(turn, width))]

    def _inside(self, turn: Expr, stmts: list[Stmt]) -> Stmt:
        """Statements for a turn's columns, as far as they exist."""
        form, number = self.form, self.number
        if form.turns is not None and form.turns * form.threads * form.lanes == self.length:
            return sequence(stmts)
        position = (turn * number(form.threads) + self.thread) * number(form.lanes)
        return IfThenElse(position < number(self.length), sequence(stmts), None)

    def _copies(self, source: Buffer, there: Iterator[Expr], target: Buffer, here: Iterator[Expr]) -> list[Stmt]:
        return [BufferStore(target, BufferLoad(source, [a]), [b]) for a, b in zip(there, here, strict=True)]

    def _kept(self, index: int, width: int) -> Iterator[Expr]:
        """Indices of a thread's ``index``-th vector in its own array."""
        number, lanes = self.number, self.form.lanes
        return (vector_at(number(index * lanes + first), width) for first in range(0, lanes, width))

    def _shared(self, at: Expr, group: Expr, width: int) -> Iterator[Expr]:
        """Indices of a group's vector in shared memory."""
        number, form = self.number, self.form
        vector = (at * number(form.groups) + group) * number(form.threads) + self.thread
        return self._pieces(vector, width)

    def _places(self, turn: Expr, width: int) -> Iterator[Expr]:
        """Indices of a turn's vector in the task's partial."""
        number, form = self.number, self.form
        vectors = self.length // form.lanes if isinstance(self.length, int) else self.length  # dynamic: one lane
        vector = self.task * number(vectors) + turn * number(form.threads) + self.thread
        return self._pieces(vector, width)

    def _pieces(self, vector: Expr, width: int) -> Iterator[Expr]:
        """Accesses of a vector, at multiples of the width: see :class:`bridge.compile.cuda.step.ThreadStep`."""
        number, pieces = self.number, self.form.lanes // width
        first = vector if pieces == 1 else vector * number(pieces)
        return (vector_at((first + number(piece)) * number(width), width) for piece in range(pieces))


_REGISTERS = 64
"""Maximum numbers of a column reduction in a thread's registers; for longer rows they are in scratch memory."""


def rows(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, plain: bool) -> list[Stmt]:
    """The launches of a plan with reductions; ``plain``: see :class:`~bridge.compile.cuda.columns.Team`."""
    first = _row_launch(plan, buffers, number, plain)
    return [first, second_stage_columns(plan, buffers, number)] if plan.finished else [first]


def _row_launch(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, plain: bool) -> Stmt:
    """The launch over the rows; leaves partials of column reductions."""
    launch = _Rows(plan, buffers, number, plain, RowVariant.of(plan)).launch()
    if isinstance(plan.length, int):
        return launch
    short = _Rows(plan, buffers, number, plain, RowVariant.short()).launch()
    return IfThenElse(number(plan.length) < number(SHORT_ROW + 1), short, launch)


def _tiles(plan: RowPlan, form: RowVariant, number: LaunchArguments) -> Expr | None:
    """The number of blocks that share a task's rows, each with one turn's columns; ``None``: one block.

    Only if nothing else of a row is combined. A column's sum keeps its order: the same threads have its elements.
    """
    if not combines_columns_alone(plan) or form.turns == 1:
        return None
    wide = form.threads * form.lanes
    return portions(number(plan.length), wide) if form.turns is None else number(form.turns)


class _Rows:
    """The launch over the rows, in one variant.

    Attributes:
        in_memory: whether cached values are in scratch memory, one row per task.
    """

    def __init__(
        self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, plain: bool, form: RowVariant
    ) -> None:
        self.plain = plain
        self.plan, self.buffers, self.number = plan, buffers, number
        self.form = form
        self.tiles = _tiles(plan, form, number)
        self.in_memory = plan.buffer_row is not None and (isinstance(plan.length, int) or form.kept is None)
        self.shared = SharedMemory(form.threads * form.groups)

    def launch(self) -> Stmt:
        plan, number, form, walk = self.plan, self.number, self.form, self.plan.walk
        if plan.column_reductions or self.in_memory:
            blocks, body = number(1 if walk.tasks is None else walk.tasks), self._task
            blocks = blocks if self.tiles is None else blocks * self.tiles
        else:
            blocks, body = portions(number(walk.rows), form.groups), self._row
        return launch(blocks, form.threads, form.groups, body, self.shared)

    def _team(self, group: Expr, thread: Expr) -> tuple[Team, ThreadScope]:
        team = Team(self.form.threads, group, thread, self.number, self.shared, self.plain)
        return team, ThreadScope(self.plan, self.buffers, self.number, tirx.EQ(thread, self.number(0)))

    def _turn(self, scope: ThreadScope, group: Expr, turn: Expr, count: Expr) -> Expr:
        """The row of ``count`` that a group takes in a turn.

        Groups after the last row repeat it, to reach every barrier, and store nothing.
        """
        first = turn * self.number(self.form.groups)
        if self.form.groups == 1:
            return first
        scope.valid = group < count - first
        return first + tirx.min(group, count - first - self.number(1))

    def _row(self, block: Var, group: Var, thread: Var) -> Stmt:
        team, scope = self._team(group, thread)
        row = self._turn(scope, group, block, self.number(self.plan.walk.rows))
        allocations = self._keep(scope, self.number(0))
        return sequence([*allocations, *emit_row(scope, self.form, team, row)])

    def _task(self, block: Var, group: Var, thread: Var) -> Stmt:
        number, walk, names, task = self.number, self.plan.walk, CudaEmitter(), block
        if self.tiles is not None:
            task = names.name_index(tirx.truncdiv(block, self.tiles), "task")
            self.form = self.form.of_tile(names.name_index(tirx.truncmod(block, self.tiles), "tile"))
        form = self.form
        team, scope = self._team(group, thread)
        begin, count = number(0), number(walk.rows)
        if walk.task_rows is not None:
            begin, count = walk.rows_of(task, number)
            begin, count = names.name_index(begin, "begin"), names.name_index(count, "count")
        allocations = self._keep(scope, task)
        turn = Var("turn", self.plan.index_type)
        row = begin + self._turn(scope, group, turn, count)
        loop = For(
            turn, number(0), portions(count, form.groups), ForKind.SERIAL, sequence(emit_row(scope, form, team, row))
        )
        first = self._partials(scope, team, True, task)
        return sequence([*names.stmts, *allocations, *first, loop, *self._partials(scope, team, False, task)])

    def _keep(self, scope: ThreadScope, task: Expr) -> list[Stmt]:
        """Allocates a thread's cached values and partials of column reductions."""
        plan, number, kept = self.plan, self.number, self.form.kept
        allocations: list[Stmt] = []
        for node in plan.cached:
            if self.in_memory:
                scope.cached[node] = RowBuffer(self.buffers.cached[node], task * number(plan.buffer_row))
                continue
            buffer, allocation = local_buffer(kept, compute_type(plan.nodes[node].dtype), "kept")
            scope.cached[node] = RowBuffer(buffer)
            allocations.append(allocation)
        for node in plan.column_reductions:
            if kept is None or kept > _REGISTERS:
                scope.partial[node] = RowBuffer(self.buffers.partial[node], task * number(plan.length))
                continue
            buffer, allocation = local_buffer(kept, compute_type(plan.nodes[node].dtype), "part")
            scope.partial[node] = RowBuffer(buffer)
            allocations.append(allocation)
        return allocations

    def _partials(self, scope: ThreadScope, team: Team, first: bool, task: Expr) -> list[Stmt]:
        """Fills the partials of column reductions with identities (``first``), or stores the partials in registers."""
        plan, number, form, stmts = self.plan, self.number, self.form, []
        together = turns_together(plan, form.threads, form.groups, form.lanes)
        for node, kept in scope.partial.items():
            op, dtype = plan.nodes[node].op, compute_type(plan.nodes[node].dtype)

            def clear(position: Expr, slot: Expr, kept=kept, op=op, dtype=dtype) -> list[Stmt]:
                start = CudaEmitter().const(identity(op, dtype), dtype)
                at = kept.at(slot, position)
                return [BufferStore(kept.buffer, start, [at + number(k)]) for k in range(form.lanes)]

            if first:
                stmts.append(form.loop(plan, number, team.thread, clear))
            elif kept.base is None:
                parts = TaskPartials(form, number, self.shared, team.group, team.thread, task, plan.length, together)
                stmts += parts.stored(kept.buffer, self.buffers.partial[node], op)
        return stmts
