"""Code for a group: one PrimFunc that walks the rows of its space.

Rows run in parallel, in chunks. Inside a row, the work is a sequence of *sweeps* over the columns: sweep ``k`` computes
what depends on ``k`` reductions of the row one after another (softmax: maximum; exponentials and their sum; the
product). A full value that a later sweep needs again is read back from where it was stored, computed again if that is
cheap, or kept in a row-sized temporary. Vectors run along the last column loop, with a scalar tail.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, PrimFunc, SeqStmt, Stmt, Var

from bridge.compile.build import LOOPS_ATTR
from bridge.compile.emit import LANES, Emitter, stack_buffer
from bridge.compile.fuse import Group, space_of
from bridge.compile.graph import Operand, Pointwise, Reduction, Scalar, Value
from bridge.compile.kernel import Kernel
from bridge.compile.pointwise import EXPENSIVE, RULES, compute_type, different
from bridge.compile.reduction import chunk_rows, column_chunks, combine, fold_lanes, identity, unroll
from bridge.compile.space import Space
from bridge.compile.views import View

__all__ = ["generate"]

_PARALLEL_WORK = 150_000  # scalar operations; a parallel launch costs microseconds
_EXPENSIVE_WORK = 12  # scalar operations a transcendental function counts for
_MAX_CHUNKS = 64
_CHEAP = 4  # operations: computing a value again instead of keeping it


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
    return _RowKernel(group, stored).build()


class _RowKernel:
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
        body += [self._finish_columns(node) for node in self.column_nodes]
        if self.space.remainder:
            body.append(self._remainder())
        func = PrimFunc(list(self.signature.values()), _sequence(body))
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
        body = _Row(self, task, self.columns)
        rows = For(row, self.const(0), count, ForKind.SERIAL, body.emit(first + row, self.space.columns))
        stmts = [*body.allocations, *self._clear_partials(task), rows]
        tasks = self.chunks * self.batch
        kind = ForKind.PARALLEL if self.parallel else ForKind.SERIAL
        return For(task, self.const(0), self.const(tasks), kind, _sequence(stmts))

    def _remainder(self) -> Stmt:
        body = _Row(self, self.const(0), self.space.remainder)
        row = body.emit(self.const(self.space.row_count), (self.space.remainder,))
        return _sequence([*body.allocations, row])

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

    def _finish_columns(self, node: Reduction) -> Stmt:
        """Combine the chunks of a column reduction, in order."""
        partial, out = self.partial[node], self.flat.get(node.out)
        if out is None:
            return tirx.Evaluate(self.const(0))
        batch = Var("batch", self.index_type)

        def add(e: Emitter, offset: Expr) -> None:
            total = None
            for chunk in range(self.chunks):
                base = (batch * self.const(self.chunks) + self.const(chunk)) * self.const(self.columns) + offset
                part = e.bind(BufferLoad(partial, [e.index(base, 1)]))
                total = part if total is None else e.bind(combine(e, node.op, total, part))
            index = e.index(batch * self.const(self.columns) + offset, 1)
            e.stmts.append(BufferStore(out, e.cast(total, node.out.dtype), [index]))

        return For(
            batch,
            self.const(0),
            self.const(self.batch),
            ForKind.SERIAL,
            _sequence(self._vectors(self.columns, add)),
        )

    def _vectors(self, count: int, body) -> list[Stmt]:
        """``body(emitter, offset)`` on vectors, then on the scalar tail."""
        stmts = []
        for lanes, begin, trips in ((LANES, 0, count // LANES), (1, count - count % LANES, count % LANES)):
            if not trips:
                continue
            e = Emitter(lanes)
            i = Var("i", self.index_type)
            body(e, self.const(begin) + i * self.const(lanes))
            stmts.append(For(i, self.const(0), self.const(trips), ForKind.SERIAL, _sequence(e.stmts)))
        return stmts


@dataclass
class _Sweep:
    """What one pass over the columns has to produce."""

    reductions: list[Reduction] = field(default_factory=list)
    stores: list[Value] = field(default_factory=list)
    kept: list[Value] = field(default_factory=list)  # into row temporaries


class _Row:
    """The code of one row of ``length`` elements."""

    def __init__(self, kernel: _RowKernel, task: Expr, length: int) -> None:
        self.kernel = kernel
        self.group = kernel.group
        self.task = task
        self.length = length
        self.allocations: list[Stmt] = []
        self.temporaries: dict[Value, Buffer] = {}
        self.scalars: dict[Value, Expr] = {}
        self.head = Emitter(1)
        self.bases: dict[tuple[View, int], Expr] = {}
        self.loads: dict[tuple, Expr] = {}
        self.sweeps = self._plan()
        for sweep in self.sweeps:
            for value in sweep.kept:
                self.temporaries[value] = self._allocate(length, compute_type(value.dtype), "kept")

    def _allocate(self, size: int, dtype: str, name: str) -> Buffer:
        buffer, allocation = stack_buffer(size, dtype, f"{name}{len(self.allocations)}")
        self.allocations.append(allocation)
        return buffer

    # Planning

    def _plan(self) -> list[_Sweep]:
        level = self.kernel.level
        count = 1 + max((level(out) for node in self.group.nodes for out in node.outs), default=0)
        sweeps = [_Sweep() for _ in range(count)]
        for node in self.group.nodes:
            if isinstance(node, Reduction):
                sweeps[level(node.operand.value)].reductions.append(node)
            elif node.out in self.kernel.stored and node not in self.group.rows_of:
                sweeps[level(node.out)].stores.append(node.out)
        kept: set[Value] = set()
        for index in reversed(range(count)):
            sweep = sweeps[index]
            roots = [node.operand.value for node in sweep.reductions] + sweep.stores + sweep.kept
            for value in self._wanted(roots, index):
                if value not in kept and not self._cheap(value, kept):
                    kept.add(value)
                    sweeps[level(value)].kept.append(value)
        self.kept = kept
        return sweeps

    def _wanted(self, roots: list[Value], index: int) -> list[Value]:
        """Full values of earlier sweeps that this sweep reads and that were not stored."""
        wanted: dict[Value, None] = {}
        seen: set[Value] = set()
        stack = [root for root in roots if root in self.group.made]
        while stack:
            value = stack.pop()
            if value in seen or self.kernel.is_row(value):
                continue
            seen.add(value)
            if self.kernel.level(value) < index:
                if value not in self.kernel.stored:
                    wanted[value] = None
                continue
            node = self.group.made[value]
            stack += [op.value for op in node.operands if isinstance(op, Operand) and op.value in self.group.made]
        return list(wanted)

    def _cheap(self, value: Value, kept: set[Value]) -> bool:
        cost, loads = 0, set()
        stack, seen = [value], set()
        while stack:
            current = stack.pop()
            if current in seen or self.kernel.is_row(current):
                continue
            seen.add(current)
            if (
                current not in self.group.made
                or current in kept
                or (current in self.kernel.stored and current != value)
            ):
                loads.add(current)
                continue
            node = self.group.made[current]
            cost += _CHEAP + 1 if node.op in EXPENSIVE else node.op != "copy"
            stack += [operand.value for operand in node.operands if isinstance(operand, Operand)]
        return cost <= _CHEAP and len(loads) <= 2

    # Emission

    def emit(self, row: Expr, extents: tuple[int, ...]) -> Stmt:
        self.extents = extents
        self.row = self.head.name_index(row, "row")
        stmts: list[Stmt] = []
        for index, sweep in enumerate(self.sweeps):
            self._row_values(index)
            stmts += self.head.stmts
            self.head.stmts = []
            stmts += self._sweep(index, sweep)
        self._row_values(len(self.sweeps))
        return _sequence(stmts + self.head.stmts)

    def _row_values(self, index: int) -> None:
        """Point-wise values of the row that are known before sweep ``index``."""
        for node in self.group.nodes:
            if node not in self.group.rows_of or node.out in self.scalars:
                continue
            if self.kernel.level(node.out) <= index:
                self.scalars[node.out] = self._compute(node, self.head, self._row_operand)
                self._store_scalar(node.out)

    def _store_scalar(self, value: Value) -> None:
        if value in self.kernel.stored:
            stored = self.head.cast(self.scalars[value], value.dtype)
            self.head.stmts.append(BufferStore(self.kernel.flat[value], stored, [self.row]))

    def _row_operand(self, operand: Operand) -> Expr:
        if operand.value in self.scalars:
            return self.scalars[operand.value]
        return self._load_scalar(operand, self.kernel.columns)

    def _load_scalar(self, operand: Operand, scale: int) -> Expr:
        key = (operand.value, operand.view, scale)
        if key not in self.loads:
            load = BufferLoad(self.kernel.flat[operand.value], [self._base(operand.view, scale)])
            self.loads[key] = self.head.bind(self.head.cast(load, compute_type(operand.dtype)), "s")
        return self.loads[key]

    def _base(self, view: View, scale: int) -> Expr:
        """Index of the row's first element in a view; bound once per row."""
        strides, _ = self.kernel.space.strides(view, scale)
        key = (strides, view.offset)
        if key not in self.bases:
            const = self.kernel.const
            dims = [(extent, stride) for extent, stride in zip(self.kernel.space.rows, strides, strict=True)]
            base: Expr = const(view.offset)
            below = 1
            runs: list[tuple[int, int, int]] = []  # (rows below, extent, stride), neighbours of one stride merged
            for extent, stride in reversed(dims):
                if runs and stride == runs[-1][2] * runs[-1][1]:
                    low, size, step = runs[-1]
                    runs[-1] = (low, size * extent, step)
                else:
                    runs.append((below, extent, stride))
                below *= extent
            for low, size, stride in runs:
                if stride == 0:
                    continue
                at = tirx.truncdiv(self.row, const(low)) if low > 1 else self.row
                at = tirx.truncmod(at, const(size)) if low * size < below else at
                base = base + at * const(stride)
            self.bases[key] = self.head.name_index(base, "base")
        return self.bases[key]

    def _sweep(self, index: int, sweep: _Sweep) -> list[Stmt]:
        if not (sweep.reductions or sweep.stores or sweep.kept):
            return []
        rows = [node for node in sweep.reductions if node.inner == 1]
        width = unroll(self.length) if rows else 1
        last = self.extents[-1]
        steps = ((LANES, width, 0, last // LANES), (1, 1, last - last % LANES, last % LANES))
        accumulators = {}
        start: list[Stmt] = []
        for node in rows:
            dtype = compute_type(node.out.dtype)
            for lanes, copies, _, trips in steps:
                if trips:
                    buffer = self._allocate(lanes * copies, dtype, "acc")
                    accumulators[node, lanes] = buffer
                    e = Emitter(lanes)
                    for copy in range(copies):
                        first = e.const(identity(node.op, dtype), dtype)
                        start.append(BufferStore(buffer, first, [e.index(self.kernel.const(copy * lanes), 1)]))
        loops: list[Stmt] = []
        outer = [Var(f"c{axis}", self.kernel.index_type) for axis in range(len(self.extents) - 1)]
        hoisted: list[Stmt] = []
        for lanes, copies, begin, trips in steps:
            if not trips:
                continue
            const = self.kernel.const
            i = Var("i", self.kernel.index_type)
            body: list[Stmt] = []
            for copy in range(copies):
                at = const(begin) + (i * const(copies) + const(copy)) * const(lanes)
                body += _Body(self, index, lanes, [*outer, at], accumulators, copy).emit(sweep)
            loops.append(For(i, const(0), const(trips // copies), ForKind.SERIAL, _sequence(body)))
        hoisted += self.head.stmts  # scalar loads that the bodies asked for
        self.head.stmts = []
        stmt = _sequence(loops)
        for var, extent in reversed(list(zip(outer, self.extents[:-1], strict=True))):
            stmt = For(var, self.kernel.const(0), self.kernel.const(extent), ForKind.SERIAL, stmt)
        for node in rows:
            self._finish_row(node, accumulators, width)
        finish, self.head.stmts = self.head.stmts, []
        return [*start, *hoisted, stmt, *finish]

    def _finish_row(self, node: Reduction, accumulators: dict, width: int) -> None:
        total = None
        if (node, LANES) in accumulators:
            e = Emitter(LANES)
            buffer = accumulators[node, LANES]
            parts = [e.bind(BufferLoad(buffer, [e.index(self.kernel.const(k * LANES), 1)])) for k in range(width)]
            while len(parts) > 1:
                parts = [e.bind(combine(e, node.op, a, b)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            total = fold_lanes(e, node.op, parts[0])
            self.head.stmts += e.stmts
        if (node, 1) in accumulators:
            tail = self.head.bind(BufferLoad(accumulators[node, 1], [self.kernel.const(0)]))
            total = tail if total is None else self.head.bind(combine(self.head, node.op, total, tail))
        total = _rounded(self.head, total, node.out.dtype)
        self.scalars[node.out] = self.head.bind(total, "r")
        self._store_scalar(node.out)

    def _compute(self, node: Pointwise, e: Emitter, read) -> Expr:
        args = [
            e.const(op.number, compute_type(op.dtype)) if isinstance(op, Scalar) else read(op) for op in node.operands
        ]
        if node.op == "astype":
            return e.bind(_converted(e, args[0], node))
        return e.bind(_rounded(e, RULES[node.op](e, *args), node.out.dtype, node.op))


class _Body:
    """One vector (or scalar) step of a sweep."""

    def __init__(self, row: _Row, index: int, lanes: int, at: list[Expr], accumulators: dict, copy: int) -> None:
        self.row = row
        self.kernel = row.kernel
        self.index = index
        self.e = Emitter(lanes)
        self.at = at
        self.accumulators = accumulators
        self.copy = copy
        self.values: dict[Value, Expr] = {}
        self.loads: dict[tuple, Expr] = {}
        position: Expr = self.kernel.const(0)
        for extent, coordinate in zip(row.extents, at, strict=True):
            position = position * self.kernel.const(extent) + coordinate
        self.position = position  # of the first lane, in the row

    def emit(self, sweep: _Sweep) -> list[Stmt]:
        e = self.e
        for value in sweep.stores:
            index = self.row.row * self.kernel.const(self.kernel.columns) + self.position
            stored = e.cast(self.value(value), value.dtype)
            e.stmts.append(BufferStore(self.kernel.flat[value], stored, [e.index(index, 1)]))
        for value in sweep.kept:
            buffer = self.row.temporaries[value]
            e.stmts.append(BufferStore(buffer, self.value(value), [e.index(self.position, 1)]))
        for node in sweep.reductions:
            dtype = compute_type(node.out.dtype)
            operand = e.cast(self.read(node.operand), dtype)
            if node.inner == 1:
                buffer = self.accumulators[node, e.lanes]
                at = e.index(self.kernel.const(self.copy * e.lanes), 1)
            else:
                buffer = self.kernel.partial[node]
                at = e.index(self.row.task * self.kernel.const(self.kernel.columns) + self.position, 1)
            old = e.bind(BufferLoad(buffer, [at]))
            e.stmts.append(BufferStore(buffer, combine(e, node.op, old, operand), [at]))
        return e.stmts

    def value(self, value: Value) -> Expr:
        """A member's full value at this step."""
        if value not in self.values:
            self.values[value] = self._value(value)
        return self.values[value]

    def _value(self, value: Value) -> Expr:
        if self.kernel.level(value) < self.index:
            if value in self.row.temporaries:
                return self.e.bind(BufferLoad(self.row.temporaries[value], [self.e.index(self.position, 1)]))
            if value in self.kernel.stored:
                index = self.row.row * self.kernel.const(self.kernel.columns) + self.position
                load = BufferLoad(self.kernel.flat[value], [self.e.index(index, 1)])
                return self.e.bind(self.e.cast(load, compute_type(value.dtype)))
        return self.row._compute(self.row.group.made[value], self.e, self.read)

    def read(self, operand: Operand) -> Expr:
        """An operand at this step, in its compute type."""
        if operand.value in self.row.scalars:
            return self.e.broadcast(self.row.scalars[operand.value])
        if operand.value in self.row.group.made:
            return self.value(operand.value)
        key = (operand.value, operand.view)
        if key not in self.loads:
            self.loads[key] = self._load(operand)
        return self.loads[key]

    def _load(self, operand: Operand) -> Expr:
        e, view = self.e, operand.view
        _, strides = self.kernel.space.strides(view)
        if not any(strides):
            return e.broadcast(self.row._load_scalar(operand, 1))
        index = self.row._base(view, 1)
        for coordinate, stride in zip(self.at, strides, strict=True):
            if stride:
                index = index + coordinate * self.kernel.const(stride)
        buffer = self.kernel.flat[operand.value]
        if strides[-1] == 0 and e.lanes > 1:
            scalar = BufferLoad(buffer, [index])
            return e.bind(e.cast(e.broadcast(scalar), compute_type(operand.dtype)))
        load = BufferLoad(buffer, [e.index(index, strides[-1])])
        return e.bind(e.cast(load, compute_type(operand.dtype)))


def _rounded(e: Emitter, value: Expr, dtype: str, op: str = "") -> Expr:
    """``value`` rounded to a stored type, in its compute type."""
    if compute_type(dtype) == dtype or op == "copy":
        return value
    value = e.bind(value)
    if dtype == "bfloat16":
        return _rounded_to_bfloat16(e, value)
    return e.cast(e.cast(value, dtype), compute_type(dtype))


def _rounded_to_bfloat16(e: Emitter, value: Expr) -> Expr:
    # By hand: TVM computes bfloat16 in float32 and drops a cast there and back.
    bits = e.bind(e.reinterpret(value, "int32"))
    odd = tirx.bitwise_and(tirx.shift_right(bits, e.const(16, "int32")), e.const(1, "int32"))
    up = e.bind(bits + e.const(0x7FFF, "int32") + odd)
    kept = e.reinterpret(tirx.bitwise_and(up, e.const(-0x10000, "int32")), "float32")
    return e.select(different(value, value), e.const(float("nan"), "float32"), kept)


def _converted(e: Emitter, value: Expr, node: Pointwise) -> Expr:
    source, target = node.operands[0].dtype, node.out.dtype
    if target == "bool":
        return different(value, e.const(0, compute_type(source)))
    if source == "bool":
        kind = compute_type(target)
        return e.select(value, e.const(1, kind), e.const(0, kind))
    return _rounded(e, e.cast(value, compute_type(target)), target)


def _sequence(stmts: list[Stmt]) -> Stmt:
    return stmts[0] if len(stmts) == 1 else SeqStmt(stmts)
