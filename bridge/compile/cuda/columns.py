"""Column reductions on a GPU: a column plan → threads that combine by halves, and the second launch.

Trees over threads: a value of each thread → one value that all threads have. Element ``i`` is combined with element
``i + half``, for successively smaller halves; the lower one is the accumulator.

Column reduction kernels: a column plan → one or more threads for each column. One thread adds few rows, in order; many
rows are distributed over reducers. The launch has code for both, because only it knows the number of rows.

Second launch of column reductions: the tasks' partials → results. A column's partials are distributed over reducers,
each adds its own in order; the reducers are combined by halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, PrimFunc, Stmt, Var

from autodiff.ir import compute_type
from bridge.compile.codegen.emit import element_type
from bridge.compile.codegen.pointwise import combine, identity
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer, loop_function, sequence
from bridge.compile.cuda.emitter import (
    CudaEmitter,
    SharedMemory,
    launch,
    local_buffer,
    portions,
    storage_type,
    synchronize,
)
from bridge.compile.cuda.limits import BLOCK_THREADS, COLUMN_LANES, FEW_ROWS, SECOND_STAGE_LANES, WARP
from bridge.compile.schedule.products import ColumnPlan
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["ColumnLaunches", "Halved", "ReductionLanes", "Team", "halve", "second_stage_columns"]


@dataclass(frozen=True)
class Halved:
    """One value to combine: the operation, the shared buffer, and a member's index → its element's index there."""

    op: str
    buffer: Buffer
    place: Callable[[Expr], Expr]


def halve(parts: Sequence[Halved], count: int, member: Expr, number: LaunchArguments) -> list[Stmt]:
    """Combines the members' elements into the first one's, which all threads may read afterwards."""
    stmts: list[Stmt] = [synchronize()]
    for half in _halves(count):
        stmts += _step(parts, half, member, member < number(half), number)
    return stmts


def _halves(count: int) -> list[int]:
    """``count / 2, …, 2, 1``."""
    return [1 << bit for bit in reversed(range(max(count, 1).bit_length() - 1))]


def _step(parts: Sequence[Halved], half: int, member: Expr, active: Expr, number: LaunchArguments) -> tuple[Stmt, Stmt]:
    """Combines each active member's element with the one ``half`` further; then a barrier."""
    e = CudaEmitter()
    for part in parts:
        mine, other = (BufferLoad(part.buffer, [part.place(at)]) for at in (member, member + number(half)))
        e.stmts.append(BufferStore(part.buffer, combine(e, part.op, mine, other), [part.place(member)]))
    return IfThenElse(active, sequence(e.stmts), None), synchronize()


@dataclass(frozen=True)
class Team:
    """The threads of a group, which combine their partials of a row.

    First the threads of a warp by halves, then the warps by halves. CUDA's form exchanges values between threads of a
    warp directly; the plain form does the same steps in shared memory.

    Attributes:
        threads: their number, a power of two.
        group, thread: indices of this group and thread in the block.
        shared: a buffer for each simultaneous combination, with an element for each warp of the block (at most as many
            as a warp has threads), or, in the plain form, for each thread.
        plain: whether to use the plain form.
    """

    threads: int
    group: Expr
    thread: Expr
    number: LaunchArguments
    shared: SharedMemory
    plain: bool

    def totals(self, e: CudaEmitter, parts: Sequence[tuple[str, str, Expr]]) -> list[Expr]:
        """Each ``(op, type, value)`` → all threads' values combined."""
        if self.threads == 1 or not parts:
            return [value for _, _, value in parts]
        return self._in_memory(e, parts) if self.plain else self._exchanged(e, parts)

    def _in_memory(self, e: CudaEmitter, parts: Sequence[tuple[str, str, Expr]]) -> list[Expr]:
        number, thread = self.number, self.thread
        first = self.group * number(self.threads)
        halved = []
        e.stmts.append(synchronize())
        for index, (op, dtype, value) in enumerate(parts):
            buffer = self.shared(dtype, index)
            e.stmts.append(BufferStore(buffer, value, [first + thread]))
            halved.append(Halved(op, buffer, lambda member: first + member))
        e.stmts.append(synchronize())
        for half in (*_halves(min(self.threads, WARP)), *(WARP * half for half in _halves(self.threads // WARP))):
            active = tirx.bitwise_and(thread, number(2 * half - 1)) < number(half)
            e.stmts += _step(halved, half, thread, active, number)
        return [e.bind(BufferLoad(part.buffer, [first]), "total") for part in halved]

    def _exchanged(self, e: CudaEmitter, parts: Sequence[tuple[str, str, Expr]]) -> list[Expr]:
        number, thread, warps = self.number, self.thread, self.threads // WARP
        totals = [self._butterfly(e, op, value, min(self.threads, WARP)) for op, _, value in parts]
        if warps < 2:
            return totals
        place = self.group * number(warps)
        stores = [
            BufferStore(self.shared(dtype, index, WARP), total, [place + tirx.truncdiv(thread, number(WARP))])
            for index, ((_, dtype, _), total) in enumerate(zip(parts, totals, strict=True))
        ]
        first_lane = tirx.EQ(tirx.bitwise_and(thread, number(WARP - 1)), number(0))
        e.stmts += [synchronize(), IfThenElse(first_lane, sequence(stores), None), synchronize()]
        found = []
        for index, (op, dtype, _) in enumerate(parts):
            at = place + tirx.bitwise_and(thread, number(warps - 1))
            found.append(self._butterfly(e, op, e.bind(BufferLoad(self.shared(dtype, index, WARP), [at])), warps))
        return found

    def _butterfly(self, e: CudaEmitter, op: str, value: Expr, count: int) -> Expr:
        """The values of ``count`` neighbours in a warp, combined by halves; each neighbour gets the result."""
        for half in _halves(count):
            value, dtype = e.bind(value), element_type(value)
            other = e.bind(tirx.call_pure_extern(dtype, "bridge_shuffle_xor", value, tirx.const(half, "int32")))
            if op in ("sum", "prod") or dtype != "float64":  # commutative in every bit
                value = e.bind(combine(e, op, value, other))
                continue
            lower = tirx.EQ(tirx.bitwise_and(self.thread, self.number(half)), self.number(0))
            pair = (tirx.Select(lower, value, other), tirx.Select(lower, other, value))
            value = e.bind(combine(e, op, *map(e.bind, pair)))
        return value


@dataclass(frozen=True)
class ReductionLanes:
    """``count`` reducers, a power of two, for each of a warp of columns.

    Attributes:
        reducer, column: indices of this thread's reducer and column in the block.
        shared: a buffer with an element for each thread.
    """

    count: int
    reducer: Expr
    column: Expr
    number: LaunchArguments
    shared: SharedMemory

    @property
    def leads(self) -> Expr:
        """Whether this thread gets the total."""
        return tirx.EQ(self.reducer, self.number(0))

    def combined(
        self, op: str, dtype: str, part: Callable[[CudaEmitter, Expr], Expr], parts: Expr
    ) -> tuple[list[Stmt], Expr]:
        """Statements that combine ``part(emitter, index)`` for all indices, and the leading thread's total."""
        number, e = self.number, CudaEmitter()
        turn = Var("turn", number.index_type)
        acc, allocation = local_buffer(1, dtype, "acc")
        at, inside = [number(0)], CudaEmitter()
        index = inside.name_index(turn * number(self.count) + self.reducer, "part")
        value = inside.bind(part(inside, index))
        inside.stmts.append(BufferStore(acc, combine(inside, op, BufferLoad(acc, at), value), at))
        turns = tirx.truncdiv(parts - self.reducer + number(self.count - 1), number(self.count))
        stmts = [
            allocation,
            BufferStore(acc, e.const(identity(op, dtype), dtype), at),
            For(turn, number(0), turns, ForKind.SERIAL, sequence(inside.stmts)),
        ]
        if self.count == 1:
            return stmts, BufferLoad(acc, at)
        shared = self.shared(dtype)

        def place(member: Expr) -> Expr:
            return member * number(WARP) + self.column

        stmts += [synchronize(), BufferStore(shared, BufferLoad(acc, at), [place(self.reducer)])]
        stmts += halve([Halved(op, shared, place)], self.count, self.reducer, number)
        return stmts, BufferLoad(shared, [place(number(0))])


class ColumnLaunches:
    """The kernel of a plan; parameters: the source, the result, the launch's integers."""

    def __init__(self, plan: ColumnPlan) -> None:
        self.plan = plan
        self.number = LaunchArguments(plan.arguments, plan.index_type)
        self.source = flat_buffer(storage_type(plan.source), "in0", plan.index_type)
        self.target = flat_buffer(storage_type(plan.target), "out0", plan.index_type)

    def build(self) -> PrimFunc:
        number = self.number
        few = number(self.plan.rows) < number(FEW_ROWS)
        launches = IfThenElse(few, self._launch(BLOCK_THREADS, 1), self._launch(WARP, COLUMN_LANES))
        return loop_function([self.source, self.target, *number.params], sequence([*number.stmts, launches]))

    def _launch(self, columns: int, reducers: int) -> Stmt:
        plan, number = self.plan, self.number
        count = number(plan.batches) * number(plan.length)

        shared = SharedMemory(columns * reducers)

        def body(block: Var, group: Var, thread: Var) -> Stmt:
            e = CudaEmitter()
            begin = block * number(columns)
            left = count - begin
            column = e.name_index(begin + tirx.min(thread, left - number(1)), "column")
            batch, position = tirx.truncdiv(column, number(plan.length)), tirx.truncmod(column, number(plan.length))
            position = e.name_index(position, "position")
            first = number.index(number(plan.element.offset), batch, plan.element.by_batch) + number.within(
                position, plan.columns, plan.element.steps
            )
            first = e.name_index(first, "first")

            def row(e: CudaEmitter, index: Expr) -> Expr:
                stored = e.bind(BufferLoad(self.source, [number.index(first, index, plan.element.by_row)]))
                return e.cast(e.loaded(stored, plan.source), compute_type(plan.target))

            form = ReductionLanes(reducers, group, thread, number, shared)
            stmts, total = form.combined(plan.op, compute_type(plan.target), row, number(plan.rows))
            store = BufferStore(self.target, e.stored(total, plan.target), [column])
            alone = tirx.And(form.leads, thread < left) if reducers > 1 else thread < left
            return sequence([*e.stmts, *stmts, IfThenElse(alone, store, None)])

        return launch(portions(count, columns), columns, reducers, body, shared)


def second_stage_columns(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments) -> Stmt:
    """The launch for all column reductions whose results are stored, each in blocks of its own."""
    walk, length = plan.walk, number(plan.length)
    count = number(walk.batches) * length
    chunks = number(walk.chunks)
    nodes = plan.finished
    portion = portions(count, WARP)

    shared = SharedMemory(WARP * SECOND_STAGE_LANES)

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

            form = ReductionLanes(SECOND_STAGE_LANES, group, thread, number, shared)
            summed, total = form.combined(op, str(partial.dtype), part, chunks)
            store = BufferStore(buffers.outputs[node], own.stored(total, plan.nodes[node].dtype), [column])
            alone = IfThenElse(tirx.And(form.leads, thread < left), store, None)
            here = sequence([*summed, *own.stmts, alone])
            chosen = here if chosen is None else IfThenElse(tirx.EQ(which, number(index)), here, chosen)
        return sequence([*e.stmts, chosen])

    return launch(portion * number(len(nodes)), WARP, SECOND_STAGE_LANES, body, shared)
