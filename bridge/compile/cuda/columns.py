"""Column reduction kernels: a column plan → a thread, or several, for each column.

Few rows are added by one thread, in order; many are dealt to strands. How many rows there are is known at the launch,
which has both forms.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import BufferLoad, BufferStore, Expr, IfThenElse, PrimFunc, Stmt, Var

from bridge.compile.codegen.emit import compute_type
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer, loop_function, sequence
from bridge.compile.cuda.emitter import CudaEmitter, storage_type
from bridge.compile.cuda.launch import SharedMemory, launch, portions
from bridge.compile.cuda.limits import BLOCK_THREADS, COLUMN_STRANDS, FEW_ROWS, WARP
from bridge.compile.cuda.strands import Strands
from bridge.compile.schedule.chain_plan import ColumnPlan

__all__ = ["generate_columns"]


def generate_columns(plan: ColumnPlan) -> PrimFunc:
    """The kernel of a plan: the source, the result, the launch's integers."""
    return _ColumnKernel(plan).build()


class _ColumnKernel:
    def __init__(self, plan: ColumnPlan) -> None:
        self.plan = plan
        self.number = LaunchArguments(plan.arguments, plan.index_type)
        self.source = flat_buffer(storage_type(plan.source), "in0", plan.index_type)
        self.target = flat_buffer(storage_type(plan.target), "out0", plan.index_type)

    def build(self) -> PrimFunc:
        number = self.number
        few = number(self.plan.rows) < number(FEW_ROWS)
        launches = IfThenElse(few, self._launch(BLOCK_THREADS, 1), self._launch(WARP, COLUMN_STRANDS))
        return loop_function([self.source, self.target, *number.params], sequence([*number.stmts, launches]))

    def _launch(self, columns: int, strands: int) -> Stmt:
        plan, number = self.plan, self.number
        count = number(plan.batches) * number(plan.length)

        shared = SharedMemory(columns * strands)

        def body(block: Var, group: Var, thread: Var) -> Stmt:
            e = CudaEmitter()
            begin = block * number(columns)
            left = count - begin
            column = e.name_index(begin + tirx.min(thread, left - number(1)), "column")
            batch, position = tirx.truncdiv(column, number(plan.length)), tirx.truncmod(column, number(plan.length))
            position = e.name_index(position, "position")
            first = number.index(number(plan.offset), batch, plan.by_batch) + self._column(position)
            first = e.name_index(first, "first")

            def row(e: CudaEmitter, index: Expr) -> Expr:
                stored = e.bind(BufferLoad(self.source, [number.index(first, index, plan.by_row)]))
                return e.cast(e.loaded(stored, plan.source), compute_type(plan.target))

            form = Strands(strands, group, thread, number, shared)
            stmts, total = form.combined(plan.op, compute_type(plan.target), row, number(plan.rows))
            store = BufferStore(self.target, e.stored(total, plan.target), [column])
            alone = tirx.And(form.leads, thread < left) if strands > 1 else thread < left
            return sequence([*e.stmts, *stmts, IfThenElse(alone, store, None)])

        return launch(portions(count, columns), columns, strands, body, shared)

    def _column(self, position: Expr) -> Expr:
        """Index of the element at a position of a row, which may be several loops."""
        plan, number = self.plan, self.number
        index = number(0)
        for axis in reversed(range(len(plan.columns))):
            at = tirx.truncmod(position, number(plan.columns[axis])) if axis else position
            position = tirx.truncdiv(position, number(plan.columns[axis]))
            if plan.steps[axis]:
                index = index + at * number(plan.steps[axis])
        return index
