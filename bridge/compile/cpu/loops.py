"""Loop nests on the CPU: a point-wise group, a reduction of columns, a permutation → parallel loops with vectors.

Row kernels: a row plan → one PrimFunc over the rows of its space. Rows run in parallel, in chunks (tasks). Each row is
:func:`bridge.compile.cpu.row.emit_row`; column reductions are accumulated per task and combined at the end, in order.
Vectors run along the last column loop, with a scalar tail.

Transposition of a square of vectors in registers: LLVM IR, and calls of it from TIR. In TVM's IR each of its shuffles
would need concatenated vectors, which cost LLVM a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import Bind, Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, PrimFunc, Stmt, Var

from autodiff.ir import compute_type, itemsize
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.pointwise import combine, identity
from bridge.compile.codegen.tir import LaunchArguments, const, flat_buffer, loop_function, sequence
from bridge.compile.cpu.row import RowScope, VectorLoop, block_of, emit_row, in_blocks, left_over, vectors_and_tail
from bridge.compile.cpu.threads import if_profitable
from bridge.compile.schedule.products import ColumnPlan, ColumnSection
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["ColumnLoops", "RowLoops", "transpose", "transposition"]


class RowLoops:
    """The kernel of a plan; parameters: inputs, results, partials of column reductions, the launch's integers."""

    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        self.number = LaunchArguments(plan.arguments, plan.index_type)
        self.buffers = KernelBuffers.of(plan)

    def build(self) -> PrimFunc:
        plan, buffers = self.plan, self.buffers
        body = [self._tasks()]
        wanted = [node for node in plan.column_reductions if node in buffers.outputs]
        body += [self._second_stage_columns(wanted)] if wanted else []
        if plan.walk.tail is not None:
            scope = RowScope(plan, buffers, self.number, self.number(0), tail=True)
            row = emit_row(scope, self.number(0))
            body += [*scope.allocations, row]
        tensors = (*buffers.inputs, *buffers.outputs.values(), *buffers.scratch)
        return loop_function([*tensors, *self.number.params], sequence([*self.number.stmts, *body]))

    def _tasks(self) -> Stmt:
        walk, number = self.plan.walk, self.number
        if walk.task_rows is None:
            return sequence(self._rows(number(0), number(0), number(walk.rows)))
        task = Var("task", self.plan.index_type)
        begin, count = walk.rows_of(task, number)
        kind = ForKind.PARALLEL if walk.parallel else ForKind.SERIAL
        tasks = For(task, number(0), number(walk.tasks), kind, sequence(self._rows(task, begin, count)))
        return if_profitable(number, walk.parallel, tasks)

    def _rows(self, task: Expr, begin: Expr, count: Expr) -> list[Stmt]:
        row = Var("row", self.plan.index_type)
        scope = RowScope(self.plan, self.buffers, self.number, task)
        cleared = self._clear_parts(scope.parts)
        if not cleared or not self.plan.walk.block_rows:
            rows = For(row, self.number(0), count, ForKind.SERIAL, emit_row(scope, begin + row))
            return [*scope.allocations, *cleared, rows]
        return [*cleared, *self._blocks(scope, begin, count)]

    def _blocks(self, scope: RowScope, begin: Expr, count: Expr) -> list[Stmt]:
        """The rows of one task; several blocks are reduced separately, in order."""
        number, head = self.number, Emitter(1)
        total = scope.parts
        size, several = block_of(number, count, self.plan.walk.block_rows)
        behind = scope.task + number(self.plan.walk.tasks)
        scope.parts = head.name_index(tirx.Select(several, behind * number(self.plan.length), total), "parts")
        before, after = (
            [IfThenElse(several, sequence(stmts), None)]
            for stmts in (self._clear_parts(scope.parts), self._add_parts(total, scope.parts))
        )
        row = Var("row", self.plan.index_type)
        loop = in_blocks(number, count, size, row, lambda at: emit_row(scope, begin + at), before, after)
        return [*scope.allocations, *head.stmts, loop]

    def _clear_parts(self, first: Expr) -> list[Stmt]:
        """Fills a row of partials with the identities of the column reductions."""
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
        """Combines one row of partials into another."""
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

    def _second_stage_columns(self, nodes: Sequence[int]) -> Stmt:
        """Combines the tasks' partials of column reductions, in order."""
        walk, number = self.plan.walk, self.number
        batch = Var("batch", self.plan.index_type)
        kind = ForKind.PARALLEL if walk.parallel_second_stage else ForKind.SERIAL
        inner, outer = (ForKind.SERIAL, kind) if walk.batched else (kind, ForKind.SERIAL)
        # Several vectors at once, because the additions of one vector depend on each other.
        copies = self.plan.accumulators[0]
        vectors = self._vectors(lambda e, at: self._finish_vectors(nodes, batch, e, at), copies, inner)
        finish = For(batch, number(0), number(walk.batches), outer, sequence(vectors))
        return if_profitable(number, walk.parallel_second_stage, finish)

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
        """``body(emitter, offsets)`` on ``copies`` vectors of a row's columns at once, then on the scalar tail."""
        stmts = []
        for part in self._parts(copies):
            e, number = Emitter(part.lanes), self.number
            i = Var("i", self.plan.index_type)
            first = part.first + i * number(part.copies * part.lanes)
            body(e, [first + number(copy * part.lanes) for copy in range(part.copies)])
            stmts.append(For(i, number(0), part.trips, ForKind.SERIAL if part.lanes == 1 else kind, sequence(e.stmts)))
        return stmts

    def _parts(self, copies: int) -> list[VectorLoop]:
        """The columns of a row as loops of ``copies`` vectors, of single vectors, and of the scalar tail."""
        length, lanes = self.plan.length, self.plan.lanes
        turns, tail = vectors_and_tail(self.number, length, lanes, (copies,))
        return [*turns, *left_over(self.number, length, lanes, copies), *tail]


class ColumnLoops:
    """The kernel of a plan; parameters: the source, the result, the launch's integers."""

    def __init__(self, plan: ColumnPlan) -> None:
        self.plan = plan
        self.number = LaunchArguments(plan.arguments, plan.index_type)
        self.source = flat_buffer(plan.source, "in0", plan.index_type)
        self.target = flat_buffer(plan.target, "out0", plan.index_type)

    def build(self) -> PrimFunc:
        body = [*map(self._section, self.plan.sections)]
        params = [self.source, self.target, *self.number.params]
        return loop_function(params, sequence([*self.number.stmts, *body]))

    def _section(self, section: ColumnSection) -> Stmt:
        """The tasks of one section: all rows of a block of columns of one batch."""
        plan, number, lanes = self.plan, self.number, section.lanes
        op, dtype = plan.op, compute_type(plan.target)
        task, row = Var("task", plan.index_type), Var("row", plan.index_type)
        batch, block = tirx.truncdiv(task, number(section.count)), tirx.truncmod(task, number(section.count))
        accumulator, allocation = stack_buffer(lanes * section.copies, dtype, "acc")
        total, beside = stack_buffer(lanes * section.copies, dtype, "total")
        start, body, finish = Emitter(lanes), Emitter(lanes), Emitter(lanes)
        clear, add = Emitter(lanes), Emitter(lanes)
        first = start.name_index(number.index(number(plan.element.offset), batch, plan.element.by_batch), "first")
        base = body.name_index(number.index(first, row, plan.element.by_row), "base")
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
        return if_profitable(number, plan.parallel, tasks)

    def _blocks(self, row: Var, clear: list[Stmt], body: list[Stmt], add: list[Stmt]) -> Stmt:
        """All rows, block by block: each is reduced separately, then combined with the preceding blocks."""
        plan, number = self.plan, self.number
        rows = number(plan.rows)
        size, _ = block_of(number, rows, plan.block_rows)
        inside = Var("inside", plan.index_type)
        return in_blocks(number, rows, size, inside, lambda at: sequence([Bind(row, at), *body]), clear, add)

    def _load(self, e: Emitter, base: Expr, column: Expr) -> Expr:
        """Elements of a row from a column on; lane by lane if there are several loops inside a row."""
        plan, number = self.plan, self.number
        if len(plan.columns) == 1:
            (step,) = plan.element.steps
            along = step if isinstance(step, int) else number(step)
            return BufferLoad(self.source, [e.index(base + column * number(step), along)])
        at = [number.within(column + number(k), plan.columns, plan.element.steps) for k in range(e.lanes)]
        lanes = [BufferLoad(self.source, [base + each]) for each in at]
        return tirx.Shuffle(lanes, list(range(e.lanes))) if e.lanes > 1 else lanes[0]


def transpose(
    dtype: str, source: tuple[Buffer, Expr], step: Expr, last: Expr, target: tuple[Buffer, Expr], pitch: int
) -> Stmt:
    """Lines of ``source``, ``step`` elements apart, become columns of ``target``, whose rows are ``pitch`` apart.

    Both are ``(buffer, index)``. A line is a vector; lines after ``last`` repeat that one.
    """
    begin, end = (tirx.address_of(BufferLoad(buffer, [at])) for buffer, at in (source, target))
    return tirx.Evaluate(tirx.call_extern("int32", _name(dtype), begin, step, last, end, const(pitch)))


def _name(dtype: str) -> str:
    return f"bridge_transpose_{dtype}"


def transposition(dtype: str, lanes: int) -> str:
    """LLVM IR of the function that :func:`transpose` calls, for a square of ``lanes x lanes`` elements."""
    element = {"float32": "float", "float64": "double"}[dtype]
    vector = f"<{lanes} x {element}>"
    lines = [
        f"define internal i32 @{_name(dtype)}(ptr %from, i64 %step, i64 %last, ptr %to, i64 %pitch) alwaysinline {{"
    ]
    for i in range(lanes):
        lines += [
            f"  %behind{i} = icmp slt i64 %last, {i}",
            f"  %line{i} = select i1 %behind{i}, i64 %last, i64 {i}",
            f"  %shift{i} = mul i64 %line{i}, %step",
            f"  %source{i} = getelementptr {element}, ptr %from, i64 %shift{i}",
            f"  %v{i} = load {vector}, ptr %source{i}, align {itemsize(dtype)}",
        ]
    current = [f"%v{i}" for i in range(lanes)]
    distance = lanes // 2
    while distance:  # exchange the off-diagonal quarters of successively smaller squares
        low = [k + lanes - distance if k & distance else k for k in range(lanes)]
        high = [k + lanes if k & distance else k + distance for k in range(lanes)]
        following = list(current)
        for i in range(lanes):
            if i & distance:
                continue
            pair = f"{vector} {current[i]}, {vector} {current[i | distance]}"
            for row, picks in ((i, low), (i | distance, high)):
                mask = ", ".join(f"i32 {pick}" for pick in picks)
                following[row] = f"%d{distance}_{row}"
                lines.append(f"  {following[row]} = shufflevector {pair}, <{lanes} x i32> <{mask}>")
        current = following
        distance //= 2
    for i, value in enumerate(current):
        lines += [
            f"  %row{i} = mul i64 %pitch, {i}",
            f"  %target{i} = getelementptr {element}, ptr %to, i64 %row{i}",
            f"  store {vector} {value}, ptr %target{i}, align {itemsize(dtype)}",
        ]
    return "\n".join([*lines, "  ret i32 0", "}", ""])
