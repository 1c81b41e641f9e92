"""Code for a group: one PrimFunc that walks the rows of its space.

Rows run in parallel, in chunks. Inside a row, the work is a sequence of *sweeps* over the columns: sweep ``k`` computes
what depends on ``k`` reductions of the row one after another (softmax: maximum; exponentials and their sum; the
product). A full value that a later sweep needs again is read back from where it was stored, computed again if that is
cheap, or kept in a row-sized temporary. Vectors run along the last column loop, with a scalar tail.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, PrimFunc, Stmt, Var

from bridge.compile.codegen.emit import LANES, Emitter
from bridge.compile.codegen.kernel import Kernel
from bridge.compile.codegen.pointwise import EXPENSIVE, compute_type
from bridge.compile.cpu.row import Row, sequence
from bridge.compile.loop_ir.graph import Concat, Operand, Pointwise, Reduction, Value
from bridge.compile.runtime.build import LOOPS_ATTR
from bridge.compile.schedule.fuse import Group, space_of
from bridge.compile.schedule.reduction import chunk_rows, column_chunks, combine, identity
from bridge.compile.schedule.space import Space

__all__ = ["generate"]

_PARALLEL_WORK = 250_000  # scalar operations: ten microseconds in vectors, where a launch costs two or three
_PARALLEL_FINISH = 32_768  # elements of partial sums; the time of a launch again
_EXPENSIVE_WORK = 12  # scalar operations a transcendental function counts for
_MAX_CHUNKS = 64


def work(group: Group) -> int:
    """Scalar operations of a group, roughly."""
    total = 0
    for node in group.nodes:
        size = node.operand.view.numel if isinstance(node, Reduction) else node.out.numel
        heavy = isinstance(node, Pointwise) and node.op in EXPENSIVE
        total += size * (_EXPENSIVE_WORK if heavy else 1)
    return total


def generate(group: Group, stored: set[Value]) -> Kernel:
    """The kernel of a group whose members ``stored`` are wanted outside."""
    return RowKernel(group, stored).build()


class RowKernel:
    def __init__(self, group: Group, stored: set[Value]) -> None:
        self.group = group
        self.space: Space = space_of(group)
        if self.space is None:
            raise AssertionError("a group without common loop extents was formed")
        self.stored = [out for node in group.nodes for out in node.outs if out in stored]
        self.inputs = list(dict.fromkeys(operand.value for _, operand in group.reads()))
        largest = max([value.numel for value in self.inputs + self.stored], default=1)
        self.index_type = "int64" if largest >= 2**31 else "int32"
        self.signature: dict[Value, Buffer] = {}
        self.flat: dict[Value, Buffer] = {}
        self.prologue: list[Stmt] = []
        self.scratch: dict[Reduction, Value] = {}
        self.partial: dict[Reduction, Buffer] = {}
        self.levels = self._levels()
        self.columns = self.space.column_count
        column_nodes = [n for n in group.nodes if isinstance(n, Reduction) and n.inner != 1]
        self.column_nodes: list[Reduction] = column_nodes
        self.concats = [node for node in group.nodes if isinstance(node, Concat)]
        self.batch = group.batch if column_nodes else 1
        self.rows = self.space.row_count // self.batch
        if column_nodes:
            self.chunks = column_chunks(self.rows, self.columns)
        else:
            self.chunks = max(1, min(_MAX_CHUNKS, self.rows))
        self.parallel = work(group) >= _PARALLEL_WORK and self.chunks * self.batch > 1
        if not self.parallel and not column_nodes:
            self.chunks = 1
        self.chunks = -(-self.rows // chunk_rows(self.rows, self.chunks))  # none of them empty

    # Levels: how many reductions of the row a value waits for.

    def _levels(self) -> dict[Value, int]:
        levels: dict[Value, int] = {}
        for node in self.group.nodes:
            level = max((levels.get(op.value, 0) for op in node.operands if isinstance(op, Operand)), default=0)
            levels[node.out] = level + (isinstance(node, Reduction) and node.inner == 1)
        return levels

    def level(self, value: Value) -> int:
        return self.levels.get(value, 0)

    def is_row(self, value: Value) -> bool:
        node = self.group.made.get(value)
        return node in self.group.rows_of or (isinstance(node, Reduction) and node.inner == 1)

    # Buffers

    def declare(self, value: Value, name: str) -> None:
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
        for index, value in enumerate(self.inputs):
            self.declare(value, f"in{index}")
        for index, value in enumerate(self.stored):
            self.declare(value, f"out{index}")
        for node in self.column_nodes:
            dtype = compute_type(node.out.dtype)
            self.scratch[node] = Value("partial", (self.batch * self.chunks * self.columns,), dtype)
            self.declare(self.scratch[node], f"partial{len(self.partial)}")
            self.partial[node] = self.flat[self.scratch[node]]
        body = [*self.prologue, self._row_loops()]
        wanted = [node for node in self.column_nodes if node.out in self.flat]
        body += [self._finish_columns(wanted)] if wanted else []
        if self.space.remainder:
            body.append(self._remainder())
        func = PrimFunc(list(self.signature.values()), sequence(body))
        func = func.with_attr({"tirx.noalias": True, "tirx.is_scheduled": True, LOOPS_ATTR: True})
        ops = tuple(node.op for node in self.group.nodes)
        return Kernel(func, tuple(self.inputs), tuple(self.stored), tuple(self.scratch.values()), ops)

    # Loops over rows

    def const(self, number: int) -> Expr:
        return tirx.const(number, self.index_type)

    def _row_loops(self) -> Stmt:
        size = chunk_rows(self.rows, self.chunks)
        task = Var("task", self.index_type)
        row = Var("row", self.index_type)
        chunk = tirx.truncmod(task, self.const(self.chunks)) if self.batch > 1 else task
        batch = tirx.truncdiv(task, self.const(self.chunks)) if self.batch > 1 else self.const(0)
        count: Expr = self.const(size)
        if self.rows % size:
            count = tirx.min(count, self.const(self.rows) - chunk * self.const(size))
        first = batch * self.const(self.rows) + chunk * self.const(size) if self.batch > 1 else chunk * self.const(size)
        body = Row(self, task, self.columns)
        rows = For(row, self.const(0), count, ForKind.SERIAL, body.emit(first + row, self.space.columns))
        stmts = [*body.allocations, *self._clear_partials(task), rows]
        tasks = self.chunks * self.batch
        kind = ForKind.PARALLEL if self.parallel else ForKind.SERIAL
        return For(task, self.const(0), self.const(tasks), kind, sequence(stmts))

    def _remainder(self) -> Stmt:
        body = Row(self, self.const(0), self.space.remainder)
        row = body.emit(self.const(self.space.row_count), (self.space.remainder,))
        return sequence([*body.allocations, row])

    def _clear_partials(self, task: Var) -> list[Stmt]:
        stmts = []
        for node, buffer in self.partial.items():
            start = identity(node.op, str(buffer.dtype))
            base = task * self.const(self.columns)

            def store(e: Emitter, offset: Expr, buffer=buffer, start=start, base=base) -> None:
                value = e.const(start, str(buffer.dtype))
                e.stmts.append(BufferStore(buffer, value, [e.index(base + offset, 1)]))

            stmts += self._vectors(self.columns, store)
        return stmts

    def _finish_columns(self, nodes: list[Reduction]) -> Stmt:
        """Combine the chunks of column reductions, in order."""
        batch = Var("batch", self.index_type)

        def add(e: Emitter, offset: Expr) -> None:
            for node in nodes:
                total = None
                for chunk in range(self.chunks):
                    base = (batch * self.const(self.chunks) + self.const(chunk)) * self.const(self.columns) + offset
                    part = e.bind(BufferLoad(self.partial[node], [e.index(base, 1)]))
                    total = part if total is None else e.bind(combine(e, node.op, total, part))
                index = e.index(batch * self.const(self.columns) + offset, 1)
                e.stmts.append(BufferStore(self.flat[node.out], e.cast(total, node.out.dtype), [index]))

        large = self.parallel and len(nodes) * self.batch * self.chunks * self.columns >= _PARALLEL_FINISH
        kind = ForKind.PARALLEL if large else ForKind.SERIAL
        inner, outer = (ForKind.SERIAL, kind) if self.batch > 1 else (kind, ForKind.SERIAL)
        vectors = sequence(self._vectors(self.columns, add, inner))
        return For(batch, self.const(0), self.const(self.batch), outer, vectors)

    def _vectors(self, count: int, body, kind: ForKind = ForKind.SERIAL) -> list[Stmt]:
        """``body(emitter, offset)`` on vectors, then on the scalar tail."""
        stmts = []
        for lanes, begin, trips in ((LANES, 0, count // LANES), (1, count - count % LANES, count % LANES)):
            if not trips:
                continue
            e = Emitter(lanes)
            i = Var("i", self.index_type)
            body(e, self.const(begin) + i * self.const(lanes))
            tail = ForKind.SERIAL if lanes == 1 else kind
            stmts.append(For(i, self.const(0), self.const(trips), tail, sequence(e.stmts)))
        return stmts
