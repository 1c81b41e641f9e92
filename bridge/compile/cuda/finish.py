"""Second launch of column reductions: the tasks' parts → results.

A column's parts are dealt to strands, each added in order; the strands are combined by halves.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt, Var

from bridge.compile.codegen.tir import LaunchArguments, sequence
from bridge.compile.cuda.emitter import CudaEmitter
from bridge.compile.cuda.launch import SharedMemory, launch, portions
from bridge.compile.cuda.limits import FINISH_STRANDS, WARP
from bridge.compile.cuda.strands import Strands
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["finish_columns"]


def finish_columns(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments) -> Stmt:
    """The launch for all column reductions that are wanted in memory, each in blocks of its own."""
    walk, length = plan.walk, number(plan.length)
    count = number(walk.batches) * length
    chunks = number(walk.chunks)
    nodes = plan.finished
    portion = portions(count, WARP)

    shared = SharedMemory(WARP * FINISH_STRANDS)

    def body(block: Var, group: Var, thread: Var) -> Stmt:
        e = CudaEmitter()
        which, within = number(0), block
        if len(nodes) > 1:
            which = e.name_index(tirx.truncmod(block, number(len(nodes))), "which")
            within = tirx.truncdiv(block, number(len(nodes)))
        begin = within * number(WARP)
        left = count - begin
        column = e.name_index(begin + tirx.min(thread, left - number(1)), "column")
        first = column
        if walk.batched:
            batch = tirx.truncdiv(column, length)
            first = e.name_index(column + batch * (chunks - number(1)) * length, "first")
        chosen: Stmt | None = None
        for index, node in reversed(list(enumerate(nodes))):
            partial, op = buffers.partial[node], plan.nodes[node].op
            own = CudaEmitter()

            def part(e: CudaEmitter, chunk: Expr, partial: Buffer = partial) -> Expr:
                return BufferLoad(partial, [first + chunk * length])

            form = Strands(FINISH_STRANDS, group, thread, number, shared)
            summed, total = form.combined(op, str(partial.dtype), part, chunks)
            store = BufferStore(buffers.outputs[node], own.stored(total, plan.nodes[node].dtype), [column])
            alone = IfThenElse(tirx.And(form.leads, thread < left), store, None)
            here = sequence([*summed, *own.stmts, alone])
            chosen = here if chosen is None else IfThenElse(tirx.EQ(which, number(index)), here, chosen)
        return sequence([*e.stmts, chosen])

    return launch(portion * number(len(nodes)), WARP, FINISH_STRANDS, body, shared)
