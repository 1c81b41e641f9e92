"""Element kernels: plans without reductions → a thread for each element, or for a few of them.

Element kernels: row plans without reductions → a thread for each vector, and for each element after the vectors.
Several plans share a launch: the first blocks belong to the first plan, and so on.

Rows of a table at indices: a plan → a thread for each of a few vectors of the result. An index outside of the table
ends the process's work on the GPU, as a failed assertion in eager's kernel does.

Gradient of a pool: a plan → a thread for each element, or for two channels of one. The places of a window's maxima are
as many bytes as all other operands together; neighbours share places through the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import Bind, Buffer, BufferLoad, BufferStore, Evaluate, Expr, IfThenElse, PrimFunc, Stmt, Var

from autodiff.ir import compute_type, itemsize
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer, loop_function, sequence
from bridge.compile.cuda.emitter import CudaEmitter, launch, local_buffer, portions, storage_type, vector_at
from bridge.compile.cuda.limits import ACCESS_BYTES, BLOCK_THREADS, ROWS_THREADS, WARP
from bridge.compile.cuda.step import ThreadScope, column_steps
from bridge.compile.loop_ir.operations import LookupPlan, PoolPlan, counting_dtype
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["PoolLaunch", "elements", "lookup"]

_LONG = 8
"""From so many warps' vectors per row on, the threads of a warp read adjacent vectors at once if a vector is smaller
than an access, and only the last warp of a row may have idle threads."""

Part = tuple[RowPlan, KernelBuffers, LaunchArguments]
"""A plan, its memory and its integers."""


def elements(parts: Sequence[Part]) -> list[Stmt]:
    """One launch for all elements of all plans."""
    works = [_work(*part) for part in parts]
    number = parts[0][2]
    ends: list[Var] = []
    stmts: list[Stmt] = []
    blocks: Expr = number(0)
    for count, _ in works:
        blocks = blocks + portions(count, ROWS_THREADS) if stmts else portions(count, ROWS_THREADS)
        ends.append(Var(f"end{len(ends)}", number.index_type))
        stmts.append(Bind(ends[-1], blocks))
        blocks = ends[-1]

    def body(block: Var, _: Var, thread: Var) -> Stmt:
        chosen = None
        for index in reversed(range(len(works))):
            own = block - ends[index - 1] if index else block
            here = works[index][1](own, thread)
            chosen = here if chosen is None else IfThenElse(block < ends[index], here, chosen)
        return chosen

    if len(works) == 1:
        return [launch(portions(works[0][0], ROWS_THREADS), ROWS_THREADS, 1, body)]
    return [*stmts, launch(blocks, ROWS_THREADS, 1, body)]


def _work(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments) -> tuple[Expr, Callable[[Expr, Expr], Stmt]]:
    """The number of threads for a plan's elements, and the code of a thread in a block of its own."""
    walk, last = plan.walk, plan.columns[-1]
    if walk.vectors is not None:  # the elements of a flat space are one row
        vectors = number(walk.vectors)
        count = vectors if walk.tail is None else vectors + number(walk.tail[1])
    else:
        lanes = math.gcd(last, plan.lanes) if isinstance(last, int) else 1
        known = isinstance(plan.length, int)
        several = plan.lanes // lanes if known and not any(plan.concats) else 1
        taken = lanes * several
        apart = WARP if known and several > 1 and plan.length >= _LONG * WARP * taken else 1
        turns = (
            number(-(-plan.length // (taken * apart)) * apart)
            if known
            else tirx.truncdiv(number(plan.length), number(lanes))
        )
        count = number(walk.rows) * turns

    def row_of(index: Expr) -> Stmt:
        row, at = tirx.truncdiv(index, turns), tirx.truncmod(index, turns)
        if apart == 1:
            return _vector(plan, buffers, number, row, at * number(taken), lanes, several)
        first, thread = tirx.truncdiv(at, number(apart)), tirx.truncmod(at, number(apart))
        position = first * number(taken * apart) + thread * number(lanes)
        return _vector(plan, buffers, number, row, position, lanes, several, lanes * apart)

    def body(block: Expr, thread: Expr) -> Stmt:
        first = block * number(ROWS_THREADS)
        index = first + thread
        if walk.vectors is None:
            inside = row_of(index)
        else:
            inside = _vector(plan, buffers, number, number(0), index * number(plan.lanes), plan.lanes)
            if walk.tail is not None:
                begin = number(walk.tail[0]) + (index - vectors)
                inside = IfThenElse(index < vectors, inside, _vector(plan, buffers, number, number(0), begin, 1))
        return IfThenElse(thread < count - first, inside, None)

    return count, body


def _vector(
    plan: RowPlan,
    buffers: KernelBuffers,
    number: LaunchArguments,
    row: Expr,
    position: Expr,
    lanes: int,
    count: int = 1,
    apart: int | None = None,
) -> Stmt:
    """The code for ``count`` vectors of a row, as far as they exist; per-row values are read once.

    ``apart``: elements from one vector to the next; ``None``: adjacent vectors.
    """
    apart = lanes if apart is None else apart
    scope = ThreadScope(plan, buffers, number, tirx.EQ(position, number(0)))
    scope.start(row)
    position = scope.head.name_index(position, "position")
    scope.leads = tirx.EQ(position, number(0))
    scope.per_row_values(0)
    stmts = scope.taken()
    steps = [_step(scope, position, lanes, apart * place) for place in range(count)]
    stmts += scope.taken()
    if count == 1 or (apart == lanes and plan.length % (lanes * count) == 0):
        return sequence([*stmts, *(stmt for step in steps for stmt in step)])
    left = number(plan.length) - position
    some = [IfThenElse(number(apart * place) < left, sequence(step), None) for place, step in enumerate(steps)]
    every = sequence([stmt for place in range(count) for stmt in _step(scope, position, lanes, apart * place)])
    # straight-line code if all exist, so that no load waits for an earlier one
    return sequence([*stmts, IfThenElse(number(apart * (count - 1)) < left, every, sequence(some))])


def _step(scope: ThreadScope, position: Expr, lanes: int, behind: int) -> list[Stmt]:
    """The code for the vector ``behind`` elements after the first."""
    e, number = CudaEmitter(), scope.number
    at = position if behind == 0 else e.name_index(position + number(behind), "position")
    return [*e.stmts, *column_steps(scope, 0, lanes, at, number(0), {})]


_TOGETHER = 4
"""Vectors that a thread loads at once if all of a GPU's threads still have work."""

_ENOUGH = 2**20
"""Least number of vectors for that."""


def lookup(plan: LookupPlan) -> PrimFunc:
    """The kernel of a lookup; parameters: the table, indices, the result."""
    number = LaunchArguments(int(not isinstance(plan.length, int)), plan.place_dtype)
    index_type, stored = number.index_type, storage_type(plan.dtype)
    table, out = (flat_buffer(stored, name, index_type) for name in ("in0", "out0"))
    indices = flat_buffer(plan.index_dtype, "in1", index_type)
    lanes = math.gcd(plan.columns, max(1, ACCESS_BYTES // itemsize(plan.dtype)))
    across = plan.columns // lanes
    vectors = number(plan.length) * number(across)
    together = _TOGETHER if isinstance(plan.length, int) and plan.length * across >= _ENOUGH else 1

    def elements(vector: Expr) -> Expr:
        return vector_at(vector * number(lanes), lanes)

    def row(e: CudaEmitter, vector: Expr) -> Expr:
        """The table's row for a vector of the result."""
        found = BufferLoad(indices, [tirx.truncdiv(vector, number(across))])
        index = e.bind(tirx.Cast("int64", found), "index")
        if plan.wraps:
            behind = index + tirx.const(plan.table, "int64")
            index = e.bind(tirx.Select(index < tirx.const(0, "int64"), behind, index), "index")
        inside = tirx.And(index >= tirx.const(0, "int64"), index < tirx.const(plan.table, "int64"))
        refused = Evaluate(tirx.call_extern("void", "bridge_refuse_index"))
        e.stmts.append(IfThenElse(tirx.Not(inside), refused, None))
        return tirx.Cast(index_type, index)

    def body(block: Var, _: Var, thread: Var) -> Stmt:
        e = CudaEmitter()
        first = e.name_index(block * number(BLOCK_THREADS * together) + thread, "first")
        loaded = []
        for turn in range(together):
            vector = e.name_index(tirx.min(first + number(turn * BLOCK_THREADS), vectors - number(1)), "vector")
            column = vector - tirx.truncdiv(vector, number(across)) * number(across)
            local, allocation = local_buffer(lanes, stored, "x")
            source = e.name_index(row(e, vector) * number(across) + column, "source")
            load = BufferStore(local, BufferLoad(table, [elements(source)]), [elements(number(0))])
            e.stmts += [allocation, load]
            loaded.append(local)
        for turn, local in enumerate(loaded):
            vector = first + number(turn * BLOCK_THREADS)
            store = BufferStore(out, BufferLoad(local, [elements(number(0))]), [elements(vector)])
            e.stmts.append(IfThenElse(vector < vectors, store, None))
        return sequence(e.stmts)

    made = launch(portions(vectors, BLOCK_THREADS * together), BLOCK_THREADS, 1, body)
    return loop_function([table, indices, out, *number.params], sequence([*number.stmts, made]))


class PoolLaunch:
    """The kernel of a pool's gradient, channels last; parameters: windows' gradients, places of maxima, the result."""

    def __init__(self, plan: PoolPlan) -> None:
        self.plan = plan
        self.lanes = 1 if plan.channels % 2 else 2
        elements = plan.batch * plan.channels * max(plan.image[0] * plan.image[1], plan.windows[0] * plan.windows[1])
        self.number = LaunchArguments(0, counting_dtype(elements))
        index_type, stored = self.number.index_type, storage_type(plan.dtype)
        self.grad = flat_buffer(stored, "in0", index_type)
        self.places = flat_buffer("int64", "in1", index_type)
        self.out = flat_buffer(stored, "out0", index_type)

    def build(self) -> PrimFunc:
        plan, number = self.plan, self.number
        vectors = plan.batch * plan.image[0] * plan.image[1] * (plan.channels // self.lanes)

        def body(block: Var, _: Var, thread: Var) -> Stmt:
            first = block * number(BLOCK_THREADS)
            return IfThenElse(thread < number(vectors) - first, sequence(self._vector(first + thread)), None)

        made = launch(portions(number(vectors), BLOCK_THREADS), BLOCK_THREADS, 1, body)
        return loop_function([self.grad, self.places, self.out], made)

    def _vector(self, index: Expr) -> list[Stmt]:
        """The elements of one place, for as many channels as there are lanes."""
        plan, number, e = self.plan, self.number, CudaEmitter()
        dtype = compute_type(plan.dtype)
        index = e.name_index(index, "index")
        element = e.name_index(tirx.truncdiv(index, number(plan.channels // self.lanes)), "element")
        row = e.name_index(tirx.truncdiv(element, number(plan.image[1])), "row")
        image = e.name_index(tirx.truncdiv(row, number(plan.image[0])), "image")
        at = row - image * number(plan.image[0]), element - row * number(plan.image[1])
        at = tuple(e.name_index(each, name) for each, name in zip(at, ("down", "along"), strict=True))
        channel = index - element * number(plan.channels // self.lanes)
        place = e.name_index(tirx.Cast("int64", element - image * number(plan.image[0] * plan.image[1])), "place")
        total, allocation = local_buffer(self.lanes, dtype, "total")
        e.stmts += [allocation, *(BufferStore(total, e.const(0, dtype), [number(k)]) for k in range(self.lanes))]
        bounds = [self._windows(e, at[axis], axis) for axis in (0, 1)]
        for down in range(plan.overlapping(0)):
            inside: list[Stmt] = []
            window_row = bounds[0][0] + number(down)
            for along in range(plan.overlapping(1)):
                window = bounds[1][0] + number(along)
                vector = (image * number(plan.windows[0]) + window_row) * number(plan.windows[1]) + window
                vector = vector * number(plan.channels // self.lanes) + channel
                added = sequence(self._added(total, vector, place, dtype))
                inside.append(IfThenElse(window <= bounds[1][1], added, None))
            e.stmts.append(IfThenElse(window_row <= bounds[0][1], sequence(inside), None))
        made, allocation = local_buffer(self.lanes, str(self.out.dtype), "y")
        stored = [
            BufferStore(made, e.stored(BufferLoad(total, [number(k)]), plan.dtype), [number(k)])
            for k in range(self.lanes)
        ]
        e.stmts += [allocation, *stored]
        e.stmts.append(BufferStore(self.out, BufferLoad(made, [self._lanes(number(0))]), [self._lanes(index)]))
        return e.stmts

    def _windows(self, e: CudaEmitter, at: Expr, axis: int) -> tuple[Expr, Expr]:
        """The first and the last window that span an element."""
        plan, number = self.plan, self.number
        behind = at + number(plan.padding[axis])
        stride = number(plan.stride[axis])
        first = tirx.max(behind - number(plan.reach(axis)), number(0)) + number(plan.stride[axis] - 1)
        last = tirx.min(tirx.truncdiv(behind, stride), number(plan.windows[axis] - 1))
        return e.name_index(tirx.truncdiv(first, stride), "first"), e.name_index(last, "last")

    def _added(self, total: Buffer, vector: Expr, place: Expr, dtype: str) -> list[Stmt]:
        """Adds a window's gradients to the elements at its maxima."""
        number, e = self.number, CudaEmitter()
        vector = e.name_index(vector, "vector")
        found = []
        for memory in (self.places, self.grad):
            local, allocation = local_buffer(self.lanes, str(memory.dtype), "x")
            loaded = BufferLoad(memory, [self._lanes(vector)])
            e.stmts += [allocation, BufferStore(local, loaded, [self._lanes(number(0))])]
            found.append(local)
        for k in range(self.lanes):
            maximum, grad = (BufferLoad(local, [number(k)]) for local in found)
            wide = e.cast(e.loaded(grad, self.plan.dtype), dtype)
            chosen = tirx.Select(tirx.EQ(maximum, place), wide, e.const(0, dtype))
            e.stmts.append(BufferStore(total, BufferLoad(total, [number(k)]) + chosen, [number(k)]))
        return e.stmts

    def _lanes(self, vector: Expr) -> Expr:
        return vector_at(vector * self.number(self.lanes), self.lanes)
