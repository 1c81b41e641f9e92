"""Column reduction kernels: a column plan → one PrimFunc whose columns run in parallel."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Bind, BufferLoad, BufferStore, Expr, For, ForKind, PrimFunc, Stmt, Var

from bridge.compile.codegen.arguments import LaunchArguments, flat_buffer
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.codegen.tir import loop_function, sequence
from bridge.compile.cpu.steps import block_of
from bridge.compile.cpu.threads import if_worth
from bridge.compile.schedule.column_plan import ColumnPlan, Section
from bridge.compile.schedule.reduction import combine, identity

__all__ = ["generate_columns"]


def generate_columns(plan: ColumnPlan) -> PrimFunc:
    """The kernel of a plan: the source, the result, the launch's integers."""
    return _ColumnKernel(plan).build()


class _ColumnKernel:
    def __init__(self, plan: ColumnPlan) -> None:
        self.plan = plan
        self.number = LaunchArguments(plan.arguments, plan.index_type)
        self.source = flat_buffer(plan.source, "in0", plan.index_type)
        self.target = flat_buffer(plan.target, "out0", plan.index_type)

    def build(self) -> PrimFunc:
        body = [*map(self._section, self.plan.sections)]
        params = [self.source, self.target, *self.number.params]
        return loop_function(params, sequence([*self.number.stmts, *body]))

    def _section(self, section: Section) -> Stmt:
        """The tasks of one section: all rows of a block of columns of one batch."""
        plan, number, lanes = self.plan, self.number, section.lanes
        op, dtype = plan.op, compute_type(plan.target)
        task, row = Var("task", plan.index_type), Var("row", plan.index_type)
        batch, block = tirx.truncdiv(task, number(section.count)), tirx.truncmod(task, number(section.count))
        accumulator, allocation = stack_buffer(lanes * section.copies, dtype, "acc")
        total, beside = stack_buffer(lanes * section.copies, dtype, "total")
        start, body, finish = Emitter(lanes), Emitter(lanes), Emitter(lanes)
        clear, add = Emitter(lanes), Emitter(lanes)
        first = start.name_index(number.index(number(plan.offset), batch, plan.by_batch), "first")
        base = body.name_index(number.index(first, row, plan.by_row), "base")
        for copy in range(section.copies):
            slot = [start.index(number(copy * lanes), 1)]
            column = number(section.begin) + (block * number(section.copies) + number(copy)) * number(lanes)
            for e, buffer in ((start, total), (clear, accumulator)):
                e.stmts.append(BufferStore(buffer, e.const(identity(op, dtype), dtype), slot))
            value = body.bind(body.cast(self._load(body, base, column), dtype))
            old = body.bind(BufferLoad(accumulator, slot))
            body.stmts.append(BufferStore(accumulator, combine(body, op, old, value), slot))
            parts = [add.bind(BufferLoad(buffer, slot)) for buffer in (total, accumulator)]
            add.stmts.append(BufferStore(total, combine(add, op, *parts), slot))
            result = finish.cast(BufferLoad(total, slot), plan.target)
            at = finish.index(batch * number(plan.length) + column, 1)
            finish.stmts.append(BufferStore(self.target, result, [at]))
        kind = ForKind.PARALLEL if plan.parallel else ForKind.SERIAL
        stmts = [allocation, beside, *start.stmts, self._blocks(row, clear.stmts, body.stmts, add.stmts), *finish.stmts]
        tasks = For(task, number(0), number(plan.batches) * number(section.count), kind, sequence(stmts))
        return if_worth(number, plan.parallel, tasks)

    def _blocks(self, row: Var, clear: list[Stmt], body: list[Stmt], add: list[Stmt]) -> Stmt:
        """All rows, block by block: each is reduced by itself, and then combined with those before."""
        plan, number = self.plan, self.number
        rows = number(plan.rows)
        size, _ = block_of(number, rows, plan.block_rows)
        block, inside = Var("block", plan.index_type), Var("inside", plan.index_type)
        first = block * size
        body = [Bind(row, first + inside), *body]
        loop = For(inside, number(0), tirx.min(size, rows - first), ForKind.SERIAL, sequence(body))
        blocks = tirx.truncdiv(rows + size - number(1), size)
        return For(block, number(0), blocks, ForKind.SERIAL, sequence([*clear, loop, *add]))

    def _load(self, e: Emitter, base: Expr, column: Expr) -> Expr:
        """Elements of a row from a column on; lane by lane where the loops inside a row are several."""
        plan, number = self.plan, self.number
        if len(plan.columns) == 1:
            (step,) = plan.steps
            along = step if isinstance(step, int) else number(step)
            return BufferLoad(self.source, [e.index(base + column * number(step), along)])
        lanes = [BufferLoad(self.source, [base + self._column(column + number(k))]) for k in range(e.lanes)]
        return tirx.Shuffle(lanes, list(range(e.lanes))) if e.lanes > 1 else lanes[0]

    def _column(self, position: Expr) -> Expr:
        """Index of the element of that number within a row of several loops."""
        plan, number = self.plan, self.number
        index, below = number(0), number(1)
        for extent, stride in reversed(list(zip(plan.columns, plan.steps, strict=True))):
            if stride:
                at = tirx.truncmod(tirx.truncdiv(position, below), number(extent))
                index = index + at * number(stride)
            below = below * number(extent)
        return index
