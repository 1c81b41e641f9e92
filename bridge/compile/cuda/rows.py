"""Row kernels: a row plan with reductions → its launches.

Rows alone: a group of threads for each. Where rows are reduced as well, or a row's buffers lie in scratch memory: a
block for each task, whose groups take the task's rows in turn; what a task has of a column reduction is combined by a
second launch, see :mod:`bridge.compile.cuda.finish`.

Of rows whose length is the launch's there are two forms, of which the launch takes one: short rows are walked by warps,
which keep in registers what a later pass reads.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import BufferStore, Expr, For, ForKind, IfThenElse, Stmt, Var

from bridge.compile.codegen.emit import compute_type
from bridge.compile.codegen.tir import LaunchArguments, sequence
from bridge.compile.cuda.ahead import reads_ahead
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer
from bridge.compile.cuda.finish import finish_columns
from bridge.compile.cuda.launch import SharedMemory, launch, portions
from bridge.compile.cuda.row import SHORT_ROW, RowForm, combines_columns_alone, emit_row
from bridge.compile.cuda.scope import Kept, ThreadScope
from bridge.compile.cuda.shared_bytes import turns_together
from bridge.compile.cuda.task_parts import TaskParts
from bridge.compile.cuda.tree import Team
from bridge.compile.schedule.reduction import identity
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["row_launch", "rows"]

_REGISTERS = 64
"""Numbers of a column reduction at most that a thread keeps for itself; of longer rows they lie in scratch memory."""


def rows(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, plain: bool) -> list[Stmt]:
    """The launches of a plan with reductions; ``plain``: see :class:`~bridge.compile.cuda.tree.Team`."""
    first = row_launch(plan, buffers, number, plain)
    return [first, finish_columns(plan, buffers, number)] if plan.finished else [first]


def row_launch(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, plain: bool = False) -> Stmt:
    """The launch that walks the rows; of columns it leaves parts."""
    launch = _Rows(plan, buffers, number, plain, RowForm.of(plan)).launch()
    if isinstance(plan.length, int):
        return launch
    short = _Rows(plan, buffers, number, plain, RowForm.short()).launch()
    return IfThenElse(number(plan.length) < number(SHORT_ROW + 1), short, launch)


def _tiles(plan: RowPlan, form: RowForm, number: LaunchArguments) -> Expr | None:
    """How many blocks share a task's rows, each with the columns of one turn: nothing else of a row is combined.

    A column's sum is the same one, for its elements are the same threads'. ``None``: one block.
    """
    if not combines_columns_alone(plan) or form.turns == 1:
        return None
    wide = form.threads * form.lanes
    return portions(number(plan.length), wide) if form.turns is None else number(form.turns)


class _Rows:
    """The rows' launch, in one form.

    Attributes:
        in_memory: whether what is kept between passes lies in scratch memory, which each task has of its own.
    """

    def __init__(
        self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, plain: bool, form: RowForm
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
        """The row, of ``count``, that a group takes in a turn.

        Groups behind the last repeat it, so that all reach every barrier, and store nothing.
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
            chunk = tirx.truncmod(task, number(walk.chunks)) if walk.batched else task
            begin = chunk * number(walk.task_rows)
            count = tirx.min(number(walk.task_rows), number(walk.rows) - begin)
            if walk.batched:
                begin = tirx.truncdiv(task, number(walk.chunks)) * number(walk.rows) + begin
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
        """Makes room for what a thread keeps: between passes, and of column reductions."""
        plan, number, form, kept = self.plan, self.number, self.form, self.form.kept
        allocations: list[Stmt] = []
        for node in plan.cached:
            if self.in_memory:
                scope.cached[node] = Kept(self.buffers.cached[node], task * number(plan.buffer_row))
                continue
            buffer, allocation = local_buffer(kept, compute_type(plan.nodes[node].dtype), "kept")
            scope.cached[node] = Kept(buffer)
            allocations.append(allocation)
        for read in reads_ahead(plan, kept) if form.lanes > 1 else ():
            buffer, allocation = local_buffer(kept, str(self.buffers.inputs[read.tensor].dtype), "ahead")
            scope.ahead[read] = Kept(buffer)
            allocations.append(allocation)
        for node in plan.column_reductions:
            if kept is None or kept > _REGISTERS:
                scope.partial[node] = Kept(self.buffers.partial[node], task * number(plan.length))
                continue
            buffer, allocation = local_buffer(kept, compute_type(plan.nodes[node].dtype), "part")
            scope.partial[node] = Kept(buffer)
            allocations.append(allocation)
        return allocations

    def _partials(self, scope: ThreadScope, team: Team, first: bool, task: Expr) -> list[Stmt]:
        """Fills the parts of column reductions with identities, or stores those that the thread keeps."""
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
                parts = TaskParts(form, number, self.shared, team.group, team.thread, task, plan.length, together)
                stmts += parts.stored(kept.buffer, self.buffers.partial[node], op)
        return stmts
