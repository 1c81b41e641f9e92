"""Row kernels: a row plan → one PrimFunc that walks the rows of its space.

Rows run in parallel, in chunks (tasks). Each row is :func:`bridge.compile.cpu.row.emit_row`; column reductions are
accumulated per task and combined at the end, in order. Vectors run along the last column loop, with a scalar tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, PrimFunc, Stmt, Var

from bridge.compile.codegen.arguments import LaunchArguments, flat_buffer
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.codegen.tir import loop_function, sequence
from bridge.compile.cpu.row import emit_row
from bridge.compile.cpu.row_scope import RowScope
from bridge.compile.cpu.steps import Steps, block_of, left_over, vectors_and_tail
from bridge.compile.cpu.threads import if_worth
from bridge.compile.schedule.reduction import combine, identity
from bridge.compile.schedule.row_plan import RowPlan
from bridge.compile.schedule.row_scope import KernelBuffers

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
        cached: dict[int, Buffer] = {}
        if plan.buffer_row is not None:
            kept = enumerate(plan.cached)
            cached = {node: self._buffer(compute_type(plan.nodes[node].dtype), f"row{i}") for i, node in kept}
        self.buffers = KernelBuffers(inputs, outputs, partial, cached)

    def _buffer(self, dtype: str, name: str) -> Buffer:
        return flat_buffer(dtype, name, self.plan.index_type)

    def build(self) -> PrimFunc:
        plan, buffers = self.plan, self.buffers
        body = [self._tasks()]
        wanted = [node for node in plan.column_reductions if node in buffers.outputs]
        body += [self._finish_columns(wanted)] if wanted else []
        if plan.walk.tail is not None:
            scope = RowScope(plan, buffers, self.number, self.number(0), tail=True)
            row = emit_row(scope, self.number(0))
            body += [*scope.allocations, row]
        scratch = (*buffers.partial.values(), *buffers.cached.values())
        tensors = (*buffers.inputs, *buffers.outputs.values(), *scratch)
        return loop_function([*tensors, *self.number.params], sequence([*self.number.stmts, *body]))

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
        tasks = For(task, number(0), number(walk.tasks), kind, sequence(self._rows(task, begin, count)))
        return if_worth(number, walk.parallel, tasks)

    def _rows(self, task: Expr, begin: Expr, count: Expr) -> list[Stmt]:
        """The rows of one task."""
        row = Var("row", self.plan.index_type)
        scope = RowScope(self.plan, self.buffers, self.number, task)
        cleared = self._clear_parts(scope.parts)
        if not cleared or not self.plan.walk.block_rows:
            rows = For(row, self.number(0), count, ForKind.SERIAL, emit_row(scope, begin + row))
            return [*scope.allocations, *cleared, rows]
        return [*cleared, *self._blocks(scope, begin, count)]

    def _blocks(self, scope: RowScope, begin: Expr, count: Expr) -> list[Stmt]:
        """The rows of one task, block by block; each is reduced by itself where there are several."""
        number, head = self.number, Emitter(1)
        total = scope.parts
        size, several = block_of(number, count, self.plan.walk.block_rows)
        behind = scope.task + number(self.plan.walk.tasks)
        scope.parts = head.name_index(tirx.Select(several, behind * number(self.plan.length), total), "parts")
        block, row = Var("block", self.plan.index_type), Var("row", self.plan.index_type)
        first = block * size
        rows = For(row, number(0), tirx.min(size, count - first), ForKind.SERIAL, emit_row(scope, begin + first + row))
        before, after = (
            IfThenElse(several, sequence(stmts), None)
            for stmts in (self._clear_parts(scope.parts), self._add_parts(total, scope.parts))
        )
        blocks = tirx.truncdiv(count + size - number(1), size)
        loop = For(block, number(0), blocks, ForKind.SERIAL, sequence([before, rows, after]))
        return [*scope.allocations, *head.stmts, loop]

    def _clear_parts(self, first: Expr) -> list[Stmt]:
        """The identities of column reductions, in a row of their partial results."""
        stmts: list[Stmt] = []
        for node, buffer in self.buffers.partial.items():
            dtype = str(buffer.dtype)
            start = identity(self.plan.nodes[node].op, dtype)

            def store(e: Emitter, offsets: Sequence[Expr], buffer=buffer, start=start, dtype=dtype) -> None:
                for offset in offsets:
                    e.stmts.append(BufferStore(buffer, e.const(start, dtype), [e.index(first + offset, 1)]))

            stmts += self._vectors(store, 1)
        return stmts

    def _add_parts(self, total: Expr, part: Expr) -> list[Stmt]:
        """One row of partial results, combined into another."""
        stmts: list[Stmt] = []
        for node, buffer in self.buffers.partial.items():
            op = self.plan.nodes[node].op

            def add(e: Emitter, offsets: Sequence[Expr], buffer=buffer, op=op) -> None:
                for offset in offsets:
                    at = [e.index(total + offset, 1)]
                    a, b = e.bind(BufferLoad(buffer, at)), e.bind(BufferLoad(buffer, [e.index(part + offset, 1)]))
                    e.stmts.append(BufferStore(buffer, combine(e, op, a, b), at))

            stmts += self._vectors(add, 1)
        return stmts

    def _finish_columns(self, nodes: Sequence[int]) -> Stmt:
        """Combines the tasks' parts of column reductions, in order."""
        walk, number = self.plan.walk, self.number
        batch = Var("batch", self.plan.index_type)
        kind = ForKind.PARALLEL if walk.parallel_finish else ForKind.SERIAL
        inner, outer = (ForKind.SERIAL, kind) if walk.batched else (kind, ForKind.SERIAL)
        # Several vectors at once, because each addition of one waits for the last.
        copies = self.plan.accumulators[0]
        vectors = self._vectors(lambda e, at: self._finish_vectors(nodes, batch, e, at), copies, inner)
        finish = For(batch, number(0), number(walk.batches), outer, sequence(vectors))
        return if_worth(number, walk.parallel_finish, finish)

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
        stmts = []
        for part in self._parts(copies):
            e, number = Emitter(part.lanes), self.number
            i = Var("i", self.plan.index_type)
            first = part.first + i * number(part.copies * part.lanes)
            body(e, [first + number(copy * part.lanes) for copy in range(part.copies)])
            stmts.append(For(i, number(0), part.trips, ForKind.SERIAL if part.lanes == 1 else kind, sequence(e.stmts)))
        return stmts

    def _parts(self, copies: int) -> list[Steps]:
        """The columns of a row in so many vectors at once, in those left over one by one, and in the scalar tail."""
        length, lanes = self.plan.length, self.plan.lanes
        turns, tail = vectors_and_tail(self.number, length, lanes, (copies,))
        return [*turns, *left_over(self.number, length, lanes, copies), *tail]
