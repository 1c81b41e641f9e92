"""Second launch of column reductions: the tasks' parts → results.

A column's parts are dealt to strands, each added in order; the strands are combined by halves.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt, Var

from bridge.compile.codegen.arguments import LaunchArguments
from bridge.compile.codegen.tir import sequence
from bridge.compile.cuda.emitter import CudaEmitter
from bridge.compile.cuda.launch import SharedMemory, launch, portions
from bridge.compile.cuda.limits import FINISH_STRANDS, WARP
from bridge.compile.cuda.strands import Strands
from bridge.compile.schedule.row_plan import RowPlan
from bridge.compile.schedule.row_scope import KernelBuffers

__all__ = ["finish_columns"]


def finish_columns(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments) -> Stmt:
    """The launch for all column reductions that are wanted in memory."""
    walk, length = plan.walk, number(plan.length)
    count = number(walk.batches) * length
    chunks = number(walk.chunks)

    shared = SharedMemory(WARP * FINISH_STRANDS)

    def body(block: Var, group: Var, thread: Var) -> Stmt:
        e = CudaEmitter()
        begin = block * number(WARP)
        left = count - begin
        column = e.name_index(begin + tirx.min(thread, left - number(1)), "column")
        first = column
        if walk.batched:
            batch = tirx.truncdiv(column, length)
            first = e.name_index(column + batch * (chunks - number(1)) * length, "first")
        stmts = e.stmts
        for node in plan.column_reductions:
            if node not in buffers.outputs:
                continue
            partial, op = buffers.partial[node], plan.nodes[node].op

            def part(e: CudaEmitter, chunk: Expr, partial: Buffer = partial) -> Expr:
                return BufferLoad(partial, [first + chunk * length])

            form = Strands(FINISH_STRANDS, group, thread, number, shared)
            summed, total = form.combined(op, str(partial.dtype), part, chunks)
            store = BufferStore(buffers.outputs[node], e.stored(total, plan.nodes[node].dtype), [column])
            stmts += [*summed, IfThenElse(tirx.And(form.leads, thread < left), store, None)]
        return sequence(stmts)

    return launch(portions(count, WARP), WARP, FINISH_STRANDS, body, shared)
