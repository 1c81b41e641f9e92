"""Row kernels: a row plan → one PrimFunc that walks the rows of its space.

Rows run in parallel, in chunks (tasks). Each row is :func:`bridge.compile.cpu.row.emit_row`; column reductions are
accumulated per task and combined at the end, in order. Vectors run along the last column loop, with a scalar tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, PrimFunc, Stmt, Var

from bridge.compile.codegen.arguments import LaunchArguments, flat_buffer
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.codegen.tir import loop_function, sequence
from bridge.compile.cpu.row import emit_row
from bridge.compile.cpu.row_scope import KernelBuffers, RowScope
from bridge.compile.schedule.reduction import combine, identity
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["generate"]


def generate(plan: RowPlan) -> PrimFunc:
    """The kernel of a plan: inputs, results, the column reductions' partial results, the launch's integers."""
    return _RowKernel(plan).build()


class _RowKernel:
    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        self.number = LaunchArguments(plan.arguments, plan.index_type)
        inputs = [self._buffer(dtype, f"in{index}") for index, dtype in enumerate(plan.inputs)]
        outputs = {node: self._buffer(plan.nodes[node].dtype, f"out{i}") for i, node in enumerate(plan.outputs)}
        reduced = enumerate(plan.column_reductions)
        partial = {node: self._buffer(compute_type(plan.nodes[node].dtype), f"partial{i}") for i, node in reduced}
        self.buffers = KernelBuffers(inputs, outputs, partial)

    def _buffer(self, dtype: str, name: str) -> Buffer:
        return flat_buffer(dtype, name, self.plan.index_type)

    def build(self) -> PrimFunc:
        plan, buffers = self.plan, self.buffers
        body = [*self.number.stmts, self._tasks()]
        wanted = [node for node in plan.column_reductions if node in buffers.outputs]
        body += [self._finish_columns(wanted)] if wanted else []
        if plan.walk.tail is not None:
            scope = RowScope(plan, buffers, self.number, self.number(0), tail=True)
            row = emit_row(scope, self.number(0))
            body += [*scope.allocations, row]
        tensors = (*buffers.inputs, *buffers.outputs.values(), *buffers.partial.values())
        return loop_function([*tensors, *self.number.params], sequence(body))

    def _tasks(self) -> Stmt:
        """The rows, by one task or many."""
        walk, number = self.plan.walk, self.number
        if walk.task_rows is None:
            return sequence(self._rows(number(0), number(0), number(walk.rows)))
        task = Var("task", self.plan.index_type)
        chunk = tirx.truncmod(task, number(walk.chunks)) if walk.batched else task
        begin = chunk * number(walk.task_rows)
        count = tirx.min(number(walk.task_rows), number(walk.rows) - begin)
        if walk.batched:
            begin = tirx.truncdiv(task, number(walk.chunks)) * number(walk.rows) + begin
        kind = ForKind.PARALLEL if walk.parallel else ForKind.SERIAL
        return For(task, number(0), number(walk.tasks), kind, sequence(self._rows(task, begin, count)))

    def _rows(self, task: Expr, begin: Expr, count: Expr) -> list[Stmt]:
        """The rows of one task."""
        row = Var("row", self.plan.index_type)
        scope = RowScope(self.plan, self.buffers, self.number, task)
        rows = For(row, self.number(0), count, ForKind.SERIAL, emit_row(scope, begin + row))
        return [*scope.allocations, *self._clear_partials(task), rows]

    def _clear_partials(self, task: Expr) -> list[Stmt]:
        plan, stmts = self.plan, []
        base = task * self.number(plan.length)
        for node, buffer in self.buffers.partial.items():
            dtype = str(buffer.dtype)
            start = identity(plan.nodes[node].op, dtype)

            def store(e: Emitter, offsets: Sequence[Expr], buffer=buffer, start=start, dtype=dtype) -> None:
                for offset in offsets:
                    e.stmts.append(BufferStore(buffer, e.const(start, dtype), [e.index(base + offset, 1)]))

            stmts += self._vectors(store, 1)
        return stmts

    def _finish_columns(self, nodes: Sequence[int]) -> Stmt:
        """Combines the tasks' parts of column reductions, in order."""
        walk, number = self.plan.walk, self.number
        batch = Var("batch", self.plan.index_type)
        kind = ForKind.PARALLEL if walk.parallel_finish else ForKind.SERIAL
        inner, outer = (ForKind.SERIAL, kind) if walk.batched else (kind, ForKind.SERIAL)
        # Several vectors at once, because each addition of one waits for the last.
        vectors = self._vectors(lambda e, at: self._finish_vectors(nodes, batch, e, at), self.plan.accumulators, inner)
        return For(batch, number(0), number(walk.batches), outer, sequence(vectors))

    def _finish_vectors(self, nodes: Sequence[int], batch: Expr, e: Emitter, offsets: Sequence[Expr]) -> None:
        plan, number = self.plan, self.number
        length, chunks = number(plan.length), number(plan.walk.chunks)
        chunk, body = Var("chunk", plan.index_type), Emitter(e.lanes)
        finish: list[Stmt] = []
        for node in nodes:
            partial, dtype = self.buffers.partial[node], plan.nodes[node].dtype
            total, allocation = stack_buffer(e.lanes * len(offsets), str(partial.dtype), "total")
            e.stmts.append(allocation)
            for copy, offset in enumerate(offsets):
                slot = [e.index(number(copy * e.lanes), 1)]
                first = batch * chunks * length + offset
                e.stmts.append(BufferStore(total, BufferLoad(partial, [e.index(first, 1)]), slot))
                old = body.bind(BufferLoad(total, slot))
                part = body.bind(BufferLoad(partial, [e.index(first + (chunk + number(1)) * length, 1)]))
                body.stmts.append(BufferStore(total, combine(body, plan.nodes[node].op, old, part), slot))
                index = e.index(batch * length + offset, 1)
                stored = e.cast(BufferLoad(total, slot), dtype)
                finish.append(BufferStore(self.buffers.outputs[node], stored, [index]))
        others = For(chunk, number(0), chunks - number(1), ForKind.SERIAL, sequence(body.stmts))
        e.stmts += [others, *finish]

    def _vectors(
        self, body: Callable[[Emitter, Sequence[Expr]], None], copies: int, kind: ForKind = ForKind.SERIAL
    ) -> list[Stmt]:
        """``body(emitter, offsets)`` on so many vectors of a row's columns at once, then on the scalar tail."""
        count, number, stmts = self.plan.length, self.number, []
        vectors, tail = divmod(count, self.plan.lanes)
        for lanes, at_once, begin, trips in (
            (self.plan.lanes, copies, 0, vectors // copies),
            (1, 1, count - tail, tail),
        ):
            if not trips:
                continue
            e = Emitter(lanes)
            i = Var("i", self.plan.index_type)
            first = number(begin) + i * number(at_once * lanes)
            body(e, [first + number(copy * lanes) for copy in range(at_once)])
            stmts.append(For(i, number(0), number(trips), ForKind.SERIAL if lanes == 1 else kind, sequence(e.stmts)))
        return stmts
