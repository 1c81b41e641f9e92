"""Row of a group of threads: a row plan → the code of one row, its passes and the reductions between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import compute_type
from bridge.compile.codegen.pointwise import EXPENSIVE
from bridge.compile.codegen.tir import LaunchArguments, rounded, sequence
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer
from bridge.compile.cuda.launch import portions
from bridge.compile.cuda.limits import ACCESS_BYTES, BLOCK_THREADS, VECTOR, WARP, row_groups, row_lanes, row_threads
from bridge.compile.cuda.scope import ThreadScope
from bridge.compile.cuda.shared_bytes import fitting_groups
from bridge.compile.cuda.steps import column_steps
from bridge.compile.cuda.tree import Team
from bridge.compile.schedule.reduction import combine, identity
from bridge.compile.schedule.row_plan import RowPass, RowPlan

__all__ = ["SHORT_ROW", "RowForm", "emit_row"]

_UNROLLED = 16
"""Turns of a loop over a row at most that is unrolled, so that what a thread keeps is in registers."""

_SHORT_TURNS = 8

_HELD = 64
"""Numbers of columns at most that a thread with wider vectors holds: two batch normalizations that are added have 88,
and would leave a processor a block of threads."""

_ENOUGH_BYTES = 96
"""Of a row, that a thread reads: a block of one row is enough then to keep memory busy, and none waits for another."""

SHORT_ROW = WARP * _SHORT_TURNS
"""Elements at most of a row whose length is the launch's, that a warp walks: each turn is code of its own, which NVRTC
takes its time for."""


@dataclass(frozen=True)
class RowForm:
    """How a group of threads walks a row.

    Attributes:
        threads, groups: see :mod:`bridge.compile.cuda.limits`.
        lanes: of a vector.
        turns: vectors that a thread takes at most; ``None`` where the length is the launch's.
        tile: the one turn that this block takes; ``None``: all of them.
    """

    threads: int
    groups: int
    lanes: int
    turns: int | None
    tile: Expr | None = None

    @classmethod
    def of(cls, plan: RowPlan) -> RowForm:
        last, length = plan.columns[-1], plan.length
        lanes = math.gcd(last, row_lanes(length, plan.small)) if isinstance(last, int) else 1
        threads = row_threads(length, plan.small)
        turns = -(-length // (threads * lanes)) if isinstance(length, int) else None
        groups = row_groups(length, plan.small, bool(plan.column_reductions))
        if turns is not None and not plan.column_reductions and _read_bytes(plan) * turns * lanes >= _ENOUGH_BYTES:
            groups = 1
        form = cls(threads, fitting_groups(plan, threads, groups, lanes), lanes, turns)
        return form.widened(plan) if combines_columns_alone(plan) else form

    def widened(self, plan: RowPlan) -> RowForm:
        """The same groups with vectors of twice the lanes, where all that differs from row to row is of half types,
        which then are accesses of :data:`ACCESS_BYTES`, and where no more of a turn is behind the row's end. Slow
        operators keep the threads busy as it is: of fewer vectors, fewer blocks share them. So do numbers of columns
        that a thread has in registers from row to row: with too many, few threads have any."""
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
    def short(cls) -> RowForm:
        """Of rows whose length is the launch's, and no more than :data:`SHORT_ROW`."""
        return cls(WARP, BLOCK_THREADS // WARP, 1, _SHORT_TURNS)

    @property
    def kept(self) -> int | None:
        """Elements of a row that a thread meets at most."""
        if self.tile is not None:
            return self.lanes
        return None if self.turns is None else self.turns * self.lanes

    def of_tile(self, tile: Expr) -> RowForm:
        """The same walk, of which a block takes one turn."""
        return replace(self, tile=tile)

    def in_turns(self, number: LaunchArguments, body: Callable[[Expr, Expr], list[Stmt]]) -> Stmt:
        """``body(turn, slot)`` for the block's turns; ``slot`` counts the elements that a thread meets."""
        if self.tile is not None:
            return sequence(body(self.tile, number(0)))
        turn = Var("turn", number.index_type)
        kind = ForKind.UNROLLED if self.turns <= _UNROLLED else ForKind.SERIAL
        return For(turn, number(0), number(self.turns), kind, sequence(body(turn, turn * number(self.lanes))))

    def loop(self, plan: RowPlan, number: LaunchArguments, thread: Expr, body) -> Stmt:
        """``body(emitter, position, slot)`` for the thread's vectors; ``slot`` counts the elements that it meets."""
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
    """Whether nothing of a row is combined, kept from one pass to another, or stored: what there is one of in each row
    is computed of numbers that are there, by whoever needs it."""
    apart = plan.column_reductions and plan.buffer_row is None and not any(plan.cached)
    if not apart or any(node.reduces == "row" for node in plan.nodes):
        return False
    return not any(plan.nodes[node].per_row for node in plan.outputs)


def _of_columns(plan: RowPlan) -> int:
    """Registers for numbers of a column that are the same for all rows, or combine them; fourfold in float64, whose
    arithmetic has more beside them."""
    wide = sum(plan.nodes[node].dtype == "float64" for node in plan.column_reductions)
    held = len(plan.column_reductions) + 3 * wide
    return held + sum(any(each.access.columns) and not each.access.terms for each in plan.reads)


def _read_bytes(plan: RowPlan) -> int:
    """Bytes that a thread reads of each of a row's elements, without what all rows share."""
    return sum(itemsize(plan.dtype(each)) for each in plan.reads if each.access.terms and any(each.access.columns))


def _widest(plan: RowPlan) -> int:
    """Bytes of an element at most, of what differs from row to row: results, and inputs that have rows."""
    stored = [plan.nodes[node].dtype for node in plan.outputs if not plan.nodes[node].reduces]
    read = [plan.dtype(each) for each in plan.reads if each.access.terms]
    return max(map(itemsize, [*stored, *read]), default=VECTOR)


def emit_row(scope: ThreadScope, form: RowForm, team: Team, row: Expr) -> list[Stmt]:
    """The code of one row; per-row values are computed by every thread of the group."""
    scope.start(row)
    stmts: list[Stmt] = []
    for index, row_pass in enumerate(scope.plan.passes):
        scope.per_row_values(index)
        stmts += scope.taken()
        stmts += _pass(scope, form, team, index, row_pass) if row_pass else []
    scope.per_row_values(len(scope.plan.passes))
    return stmts + scope.taken()


def _pass(scope: ThreadScope, form: RowForm, team: Team, index: int, row_pass: RowPass) -> list[Stmt]:
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
    hoisted = scope.taken()  # per-row loads that the steps asked for
    parts = [
        (plan.nodes[node].op, str(buffer.dtype), _folded(scope, node, buffer)) for node, buffer in accumulators.items()
    ]
    for node, total in zip(rows, team.totals(head, parts), strict=True):
        scope.set_scalar(node, head.bind(rounded(head, total, plan.nodes[node].dtype), "r"))
    return [*start, *hoisted, loop, *scope.taken()]


def _folded(scope: ThreadScope, node: int, buffer: Buffer) -> Expr:
    """A thread's lanes, combined by halves."""
    head, op = scope.head, scope.plan.nodes[node].op
    lanes = [BufferLoad(buffer, [scope.number(k)]) for k in range(int(buffer.shape[0]))]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [head.bind(combine(head, op, a, b)) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]
