"""Row kernels: a row plan → one PrimFunc that walks the rows of its space.

Rows run in parallel, in chunks (tasks). Each row is :func:`bridge.compile.cpu.row.emit_row`; column reductions are
accumulated per task and combined at the end, in order. Vectors run along the last column loop, with a scalar tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, Stmt, Var

from bridge.compile.codegen.emit import LANES, Emitter
from bridge.compile.codegen.kernel import Kernel
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.codegen.tir import loop_function, sequence
from bridge.compile.cpu.row import emit_row
from bridge.compile.cpu.row_scope import KernelBuffers, RowScope
from bridge.compile.loop_ir.graph import Reduction, Value
from bridge.compile.schedule.reduction import chunk_rows, combine, identity
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["generate"]

_PARALLEL_FINISH = 32_768  # elements of partial sums; worth a launch of threads


def generate(plan: RowPlan) -> Kernel:
    """The kernel of a plan: inputs, results, then the column reductions' partial results, in memory."""
    return _RowKernel(plan).build()


class _RowKernel:
    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        self.signature: dict[Value, Buffer] = {}
        self.flat: dict[Value, Buffer] = {}
        self.prologue: list[Stmt] = []
        self.scratch: dict[Reduction, Value] = {}
        self.partial: dict[Reduction, Buffer] = {}
        self.buffers = KernelBuffers(self.flat, self.partial)

    def _declare(self, value: Value, name: str) -> None:
        alignment = 1 if value.dtype == "bool" else max(1, value.nbytes // max(value.numel, 1))
        buffer = tirx.decl_buffer(value.shape, value.dtype, name, data_alignment=alignment)
        self.signature[value] = buffer
        if len(value.shape) == 1:
            self.flat[value] = buffer
            return
        flat = tirx.decl_buffer((value.numel,), value.dtype, name + "_flat", data=buffer.data, data_alignment=alignment)
        self.flat[value] = flat
        self.prologue.append(tirx.DeclBuffer(flat, data=buffer.data))

    def build(self) -> Kernel:
        plan = self.plan
        for index, value in enumerate(plan.inputs):
            self._declare(value, f"in{index}")
        for index, value in enumerate(plan.stored):
            self._declare(value, f"out{index}")
        for node in plan.column_reductions:
            dtype = compute_type(node.out.dtype)
            self.scratch[node] = Value("partial", (plan.batch * plan.chunks * plan.columns,), dtype)
            self._declare(self.scratch[node], f"partial{len(self.partial)}")
            self.partial[node] = self.flat[self.scratch[node]]
        body = [*self.prologue, self._row_loops()]
        wanted = [node for node in plan.column_reductions if node.out in self.flat]
        body += [self._finish_columns(wanted)] if wanted else []
        if plan.space.remainder:
            body.append(self._remainder())
        func = loop_function(list(self.signature.values()), sequence(body))
        ops = tuple(node.op for node in plan.group.nodes)
        return Kernel(func, plan.inputs, plan.stored, tuple(self.scratch.values()), ops)

    def _const(self, number: int) -> Expr:
        return tirx.const(number, self.plan.index_type)

    def _row_loops(self) -> Stmt:
        plan, const = self.plan, self._const
        size = chunk_rows(plan.rows, plan.chunks)
        task = Var("task", plan.index_type)
        row = Var("row", plan.index_type)
        chunk = tirx.truncmod(task, const(plan.chunks)) if plan.batch > 1 else task
        batch = tirx.truncdiv(task, const(plan.chunks)) if plan.batch > 1 else const(0)
        count: Expr = const(size)
        if plan.rows % size:
            count = tirx.min(count, const(plan.rows) - chunk * const(size))
        first = batch * const(plan.rows) + chunk * const(size) if plan.batch > 1 else chunk * const(size)
        scope = RowScope(plan, self.buffers, task, plan.space.columns)
        rows = For(row, const(0), count, ForKind.SERIAL, emit_row(scope, first + row))
        stmts = [*scope.allocations, *self._clear_partials(task), rows]
        kind = ForKind.PARALLEL if plan.parallel else ForKind.SERIAL
        return For(task, const(0), const(plan.chunks * plan.batch), kind, sequence(stmts))

    def _remainder(self) -> Stmt:
        """The shorter row behind the others."""
        space = self.plan.space
        scope = RowScope(self.plan, self.buffers, self._const(0), (space.remainder,))
        row = emit_row(scope, self._const(space.row_count))
        return sequence([*scope.allocations, row])

    def _clear_partials(self, task: Var) -> list[Stmt]:
        stmts = []
        for node, buffer in self.partial.items():
            start = identity(node.op, str(buffer.dtype))
            base = task * self._const(self.plan.columns)

            def store(e: Emitter, offset: Expr, buffer=buffer, start=start, base=base) -> None:
                value = e.const(start, str(buffer.dtype))
                e.stmts.append(BufferStore(buffer, value, [e.index(base + offset, 1)]))

            stmts += self._vectors(store)
        return stmts

    def _finish_columns(self, nodes: Sequence[Reduction]) -> Stmt:
        """Combines the chunks of column reductions, in order."""
        plan, const = self.plan, self._const
        batch = Var("batch", plan.index_type)

        def add(e: Emitter, offset: Expr) -> None:
            for node in nodes:
                total = None
                for chunk in range(plan.chunks):
                    base = (batch * const(plan.chunks) + const(chunk)) * const(plan.columns) + offset
                    part = e.bind(BufferLoad(self.partial[node], [e.index(base, 1)]))
                    total = part if total is None else e.bind(combine(e, node.op, total, part))
                index = e.index(batch * const(plan.columns) + offset, 1)
                e.stmts.append(BufferStore(self.flat[node.out], e.cast(total, node.out.dtype), [index]))

        large = plan.parallel and len(nodes) * plan.batch * plan.chunks * plan.columns >= _PARALLEL_FINISH
        kind = ForKind.PARALLEL if large else ForKind.SERIAL
        inner, outer = (ForKind.SERIAL, kind) if plan.batch > 1 else (kind, ForKind.SERIAL)
        return For(batch, const(0), const(plan.batch), outer, sequence(self._vectors(add, inner)))

    def _vectors(self, body: Callable[[Emitter, Expr], None], kind: ForKind = ForKind.SERIAL) -> list[Stmt]:
        """``body(emitter, offset)`` on vectors of a row's columns, then on the scalar tail."""
        count, stmts = self.plan.columns, []
        for lanes, begin, trips in ((LANES, 0, count // LANES), (1, count - count % LANES, count % LANES)):
            if not trips:
                continue
            e = Emitter(lanes)
            i = Var("i", self.plan.index_type)
            body(e, self._const(begin) + i * self._const(lanes))
            tail = ForKind.SERIAL if lanes == 1 else kind
            stmts.append(For(i, self._const(0), self._const(trips), tail, sequence(e.stmts)))
        return stmts
