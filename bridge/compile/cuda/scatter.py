"""Scatter sums: a plan → a launch that fills zeros and sorts indices, and one that adds rows.

A key is an index and a place, ``index * length + place``: all keys differ, and a key's rank in the sorted order is the
number of smaller keys. Each key is compared with all others, which for the rows of a batch takes less time than a
sort's launches; more keys come sorted. The places of one index are a segment of the order. One reducer's threads
add up a short segment; all reducers of the block in which a long one begins share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, PrimFunc, Stmt, Var, While

from autodiff.ir import compute_type, itemsize
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer, loop_function, sequence
from bridge.compile.cuda.columns import Halved, halve
from bridge.compile.cuda.emitter import (
    CudaEmitter,
    SharedMemory,
    launch,
    local_buffer,
    portions,
    storage_type,
    synchronize,
    vector_at,
)
from bridge.compile.cuda.limits import ACCESS_BYTES, BLOCK_THREADS, VECTOR, WARP
from bridge.compile.loop_ir.operations import ScatterPlan

__all__ = ["scatter", "sorts"]

_MOST_ROWS = 2**14
"""Maximum rows for which all keys are compared: beyond, a sort is faster."""

_MOST_WRAPPED = 2**13
"""Maximum rows if negative indices are allowed: torch's kernel for these sorts only by the indices' bits, and is as
fast as ours after a sort (0.8 of its time for 16,000 rows of 128, 1.04 for 100,000; H200)."""

_GROUPS = BLOCK_THREADS // WARP
"""Parts of the keys to compare with, one for each warp of a block."""

_TILE = 1024
"""Keys that a block has in shared memory at a time."""

_FILLED = 8
"""Vectors of zeros that a thread writes."""

_SEGMENT_THREADS = 4
"""Maximum adjacent threads per segment: 64 bytes of a row; fewer threads let more blocks share a long segment."""

_SHORT, _LONG = 4, 16
"""Rows that a thread loads at once: of a short segment, and of a long one."""


def sorts(plan: ScatterPlan, length: int) -> bool:
    """Whether keys of ``length`` rows should be sorted first."""
    return not plan.wraps and length > _MOST_ROWS


def scatter(plan: ScatterPlan, length: int) -> PrimFunc | None:
    """The kernel; parameters: rows, indices, the table, memory for sorted keys and one more; or rows, keys, the table.

    ``None`` if the library is as fast for ``length`` rows.
    """
    return None if plan.wraps and length > _MOST_WRAPPED else _ScatterKernel(plan).build()


class _ScatterKernel:
    def __init__(self, plan: ScatterPlan) -> None:
        self.plan = plan
        self.number = LaunchArguments(int(not isinstance(plan.length, int)), plan.key_dtype)
        self.length = self.number(plan.length)
        index_type, stored = self.number.index_type, storage_type(plan.dtype)
        self.rows = flat_buffer(stored, "in0", index_type)
        self.indices = flat_buffer(plan.index_dtype, "in1", index_type)
        self.table = flat_buffer(stored, "out0", index_type)
        self.order = flat_buffer(index_type, "in1" if plan.is_sorted else "out1", index_type)
        self.lanes = math.gcd(plan.columns, min(VECTOR, ACCESS_BYTES // itemsize(plan.dtype)))
        vectors = plan.columns // self.lanes
        self.threads = min(_SEGMENT_THREADS, 1 << (vectors - 1).bit_length())
        self.reducers = BLOCK_THREADS // self.threads

    def build(self) -> PrimFunc:
        read = [self.order, self.table] if self.plan.is_sorted else [self.indices, self.table, self.order]
        params = [self.rows, *read, *self.number.params]
        return loop_function(params, sequence([*self.number.stmts, self._sort_and_fill(), self._add()]))

    # ---- the first launch

    def _sort_and_fill(self) -> Stmt:
        """The sorting blocks, if any, followed by blocks that fill the table with zeros."""
        plan, number = self.plan, self.number
        vectors = plan.table * plan.columns // self.lanes
        sorting = number(0) if plan.is_sorted else portions(self.length, WARP)
        filling = portions(number(vectors), BLOCK_THREADS * _FILLED)
        shared = SharedMemory(_TILE)

        def body(block: Var, group: Var, thread: Var) -> Stmt:
            fill = sequence(self._fill(block - sorting, group * number(WARP) + thread, vectors))
            if plan.is_sorted:
                return fill
            return IfThenElse(block < sorting, sequence(self._sort(block, group, thread, shared)), fill)

        return launch(sorting + filling, WARP, _GROUPS, body, shared)

    def _fill(self, block: Expr, thread: Expr, vectors: int) -> list[Stmt]:
        number, e = self.number, CudaEmitter()
        zeros, allocation = local_buffer(self.lanes, str(self.table.dtype), "zeros")
        nothing = tirx.const(0, str(self.table.dtype))
        e.stmts += [allocation, *(BufferStore(zeros, nothing, [number(lane)]) for lane in range(self.lanes))]
        first = e.name_index(block * number(BLOCK_THREADS * _FILLED) + thread, "first")
        for turn in range(_FILLED):
            vector = first + number(turn * BLOCK_THREADS)
            store = BufferStore(self.table, BufferLoad(zeros, [self._vector(number(0))]), [self._vector(vector)])
            e.stmts.append(IfThenElse(vector < number(vectors), store, None))
        return e.stmts

    def _sort(self, block: Expr, group: Expr, thread: Expr, shared: SharedMemory) -> list[Stmt]:
        """Ranks of a warp's keys, of which each warp of the block counts a part."""
        number, e = self.number, CudaEmitter()
        index_type = number.index_type
        place = e.name_index(block * number(WARP) + thread, "place")
        key = e.bind(self._key(e, tirx.min(place, self.length - number(1))), "key")
        rank, allocation = local_buffer(1, index_type, "rank")
        at = [number(0)]
        e.stmts += [allocation, BufferStore(rank, number(0), at)]
        keys = shared(index_type)
        part = _TILE // _GROUPS

        tile, turn = Var("tile", index_type), Var("turn", index_type)
        inside = CudaEmitter()
        inside.stmts.append(synchronize())
        for each in range(_TILE // BLOCK_THREADS):
            slot = group * number(WARP) + thread + number(each * BLOCK_THREADS)
            other = inside.name_index(tile * number(_TILE) + slot, "other")
            found = inside.bind(self._key(inside, tirx.min(other, self.length - number(1))), "found")
            found = tirx.Select(other < self.length, found, self._behind)
            inside.stmts.append(BufferStore(keys, found, [slot]))
        inside.stmts.append(synchronize())
        smaller = BufferLoad(keys, [group * number(part) + turn]) < key
        counted = BufferStore(rank, BufferLoad(rank, at) + tirx.Cast(index_type, smaller), at)
        inside.stmts.append(For(turn, number(0), number(part), ForKind.SERIAL, counted))
        tiles = portions(self.length, _TILE)
        e.stmts.append(For(tile, number(0), tiles, ForKind.SERIAL, sequence(inside.stmts)))

        def member(index: Expr) -> Expr:
            return index * number(WARP) + thread

        counts = shared(index_type, 1, BLOCK_THREADS)
        e.stmts.append(BufferStore(counts, BufferLoad(rank, at), [member(group)]))
        e.stmts += halve([Halved("sum", counts, member)], _GROUPS, group, number)
        leads = tirx.And(tirx.EQ(group, number(0)), place < self.length)
        e.stmts.append(IfThenElse(leads, BufferStore(self.order, key, [BufferLoad(counts, [thread])]), None))
        last = tirx.And(tirx.EQ(group, number(0)), tirx.EQ(place, self.length - number(1)))
        e.stmts.append(IfThenElse(last, BufferStore(self.order, self._behind, [self.length]), None))
        return e.stmts

    @property
    def _behind(self) -> Expr:
        """A number larger than every key."""
        return self.number(self.plan.table) * self.length

    def _key(self, e: CudaEmitter, place: Expr) -> Expr:
        plan, number = self.plan, self.number
        index: Expr = e.name_index(tirx.Cast(number.index_type, BufferLoad(self.indices, [place])), "index")
        if plan.wraps:
            index = tirx.Select(index < number(0), index + number(plan.table), index)
        return index * self.length + place

    # ---- the second launch

    def _add(self) -> Stmt:
        """Blocks of as many places of the order as there are reducers, for the columns that adjacent threads add up."""
        plan, number = self.plan, self.number
        width = self.threads * self.lanes
        across = -(-plan.columns // width)
        shared = SharedMemory(BLOCK_THREADS)
        windows = portions(self.length, self.reducers)

        def body(block: Var, reducer: Var, thread: Var) -> Stmt:
            e = CudaEmitter()
            window = e.name_index(tirx.truncdiv(block, number(across)), "window")
            vector = (block - window * number(across)) * number(self.threads) + thread
            vector = e.name_index(vector, "vector")
            return sequence([*e.stmts, *self._segments(window, reducer, thread, vector, shared)])

        return launch(windows * number(across), self.threads, self.reducers, body, shared)

    def _segments(self, window: Expr, reducer: Expr, thread: Expr, vector: Expr, shared: SharedMemory) -> list[Stmt]:
        plan, number, e = self.plan, self.number, CudaEmitter()
        index_type = number.index_type
        long = shared(index_type, 0, 1)  # where a long segment begins: at most one does within a block's places
        nobody = self.length
        first_thread = tirx.And(tirx.EQ(reducer, number(0)), tirx.EQ(thread, number(0)))
        e.stmts += [IfThenElse(first_thread, BufferStore(long, nobody, [number(0)]), None), synchronize()]
        place = e.name_index(window * number(self.reducers) + reducer, "place")
        inside = CudaEmitter()
        begin, end, row = self._segment(inside, place)
        before = BufferLoad(self.order, [tirx.max(place - number(1), number(0))])
        wanted = tirx.And(tirx.LE(number(0), row), row < number(plan.table))
        if plan.skipped is not None:
            wanted = tirx.And(wanted, tirx.Not(tirx.EQ(row, number(plan.skipped))))
        starts = tirx.Or(tirx.EQ(place, number(0)), before < begin)
        behind = BufferLoad(self.order, [tirx.min(place + number(self.reducers), self.length)])
        is_long = BufferStore(long, place, [number(0)])
        short = sequence(self._short(place, begin, end, row, vector))
        either = IfThenElse(behind < end, IfThenElse(tirx.EQ(thread, number(0)), is_long, None), short)
        inside.stmts.append(IfThenElse(tirx.And(starts, wanted), either, None))
        e.stmts += [IfThenElse(place < self.length, sequence(inside.stmts), None), synchronize()]
        found = e.bind(BufferLoad(long, [number(0)]), "long")
        together = sequence(self._long(found, reducer, thread, vector, shared))
        e.stmts.append(IfThenElse(found < nobody, together, None))
        return e.stmts

    def _segment(self, e: CudaEmitter, place: Expr) -> tuple[Expr, Expr, Expr]:
        """The segment of a place of the order: its least possible key, the first key after it, its index."""
        key = e.bind(BufferLoad(self.order, [place]), "key")
        row = e.name_index(tirx.truncdiv(key, self.length), "row")
        begin = e.name_index(row * self.length, "begin")
        return begin, e.name_index(begin + self.length, "end"), row

    def _short(self, place: Expr, begin: Expr, end: Expr, row: Expr, vector: Expr) -> list[Stmt]:
        """Adds up a segment, and stores the sum."""
        e = CudaEmitter()
        total = self._total(e)
        e.stmts.append(self._added(total, place, self.number(1), begin, end, vector, _SHORT))
        e.stmts += self._stored(total, row, vector)
        return [IfThenElse(vector < self.number(self.plan.columns // self.lanes), sequence(e.stmts), None)]

    def _long(self, place: Expr, reducer: Expr, thread: Expr, vector: Expr, shared: SharedMemory) -> list[Stmt]:
        """The same by all reducers, whose sums are combined by halves."""
        number, e = self.number, CudaEmitter()
        begin, end, row = self._segment(e, place)
        total = self._total(e)
        vectors = number(self.plan.columns // self.lanes)
        read = tirx.min(vector, vectors - number(1))
        e.stmts.append(self._added(total, place + reducer, number(self.reducers), begin, end, read, _LONG))

        def member(index: Expr) -> Expr:
            return index * number(self.threads) + thread

        sums = [shared(compute_type(self.plan.dtype), lane) for lane in range(self.lanes)]
        for lane, buffer in enumerate(sums):
            e.stmts.append(BufferStore(buffer, BufferLoad(total, [number(lane)]), [member(reducer)]))
        e.stmts += halve([Halved("sum", buffer, member) for buffer in sums], self.reducers, reducer, number)
        stores = [
            BufferStore(total, BufferLoad(buffer, [member(number(0))]), [number(lane)])
            for lane, buffer in enumerate(sums)
        ]
        leads = tirx.And(tirx.EQ(reducer, number(0)), vector < vectors)
        e.stmts.append(IfThenElse(leads, sequence([*stores, *self._stored(total, row, vector)]), None))
        return e.stmts

    def _total(self, e: CudaEmitter) -> Buffer:
        """Allocates zeroed sums of as many columns as there are lanes."""
        dtype = compute_type(self.plan.dtype)
        total, allocation = local_buffer(self.lanes, dtype, "total")
        zeros = (BufferStore(total, e.const(0, dtype), [self.number(lane)]) for lane in range(self.lanes))
        e.stmts += [allocation, *zeros]
        return total

    def _added(
        self, total: Buffer, first: Expr, step: Expr, begin: Expr, end: Expr, vector: Expr, together: int
    ) -> Stmt:
        """Adds the rows of a segment at places ``first, first + step, …``; loads ``together`` of them at once."""
        plan, number = self.plan, self.number
        at, allocation = local_buffer(1, number.index_type, "at")
        zero = [number(0)]

        def key(place: Expr) -> Expr:
            return BufferLoad(self.order, [tirx.min(place, self.length)])

        inside = CudaEmitter()
        here = inside.bind(BufferLoad(at, zero), "here")
        keys = [inside.bind(key(here + step * number(each)), "key") for each in range(together)]
        loaded = []
        for each in keys:  # after the segment's end, the row of this turn again: it is in a cache
            place = tirx.Select(each < end, each, keys[0]) - begin
            local, its = local_buffer(self.lanes, str(self.rows.dtype), "x")
            row = inside.name_index(place * number(plan.columns // self.lanes) + vector, "from")
            loads = BufferStore(local, BufferLoad(self.rows, [self._vector(row)]), [self._vector(number(0))])
            inside.stmts += [its, loads]
            loaded.append((each < end, local))
        for is_inside, local in loaded:
            inside.stmts.append(IfThenElse(is_inside, sequence(self._plus(total, local)), None))
        inside.stmts.append(BufferStore(at, here + step * number(together), zero))
        going = While(key(BufferLoad(at, zero)) < end, sequence(inside.stmts))
        return sequence([allocation, BufferStore(at, first, zero), going])

    def _plus(self, total: Buffer, local: Buffer) -> Sequence[Stmt]:
        e, dtype = CudaEmitter(), compute_type(self.plan.dtype)
        for lane in range(self.lanes):
            at = [self.number(lane)]
            value = e.cast(e.loaded(BufferLoad(local, at), self.plan.dtype), dtype)
            e.stmts.append(BufferStore(total, BufferLoad(total, at) + value, at))
        return e.stmts

    def _stored(self, total: Buffer, row: Expr, vector: Expr) -> list[Stmt]:
        """Stores the sums, rounded, in the table."""
        number, e = self.number, CudaEmitter()
        made, allocation = local_buffer(self.lanes, str(self.table.dtype), "y")
        e.stmts.append(allocation)
        for lane in range(self.lanes):
            value = e.stored(BufferLoad(total, [number(lane)]), self.plan.dtype)
            e.stmts.append(BufferStore(made, value, [number(lane)]))
        target = row * number(self.plan.columns // self.lanes) + vector
        e.stmts.append(BufferStore(self.table, BufferLoad(made, [self._vector(number(0))]), [self._vector(target)]))
        return e.stmts

    def _vector(self, vector: Expr) -> Expr:
        return vector_at(vector * self.number(self.lanes), self.lanes)
