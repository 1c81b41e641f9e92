"""Gradient of a pool: a plan → a thread for each element, or for two channels of one.

The places of a window's maxima are as many bytes as everything else together; those that neighbours share come from
the cache.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, PrimFunc, Stmt, Var

from bridge.compile.codegen.emit import compute_type
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer, loop_function, sequence
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer, storage_type, vector_at
from bridge.compile.cuda.launch import launch, portions
from bridge.compile.cuda.limits import BLOCK_THREADS
from bridge.compile.loop_ir.operations import PoolPlan, counting_dtype

__all__ = ["pool_gradient"]


def pool_gradient(plan: PoolPlan) -> PrimFunc:
    """The kernel: gradients of the windows, the places of their maxima, the result; all with channels behind."""
    return _PoolKernel(plan).build()


class _PoolKernel:
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
        """The elements of one place, of as many channels as there are lanes."""
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
        """The first and the last window that an element lies between the ends of."""
        plan, number = self.plan, self.number
        behind = at + number(plan.padding[axis])
        stride = number(plan.stride[axis])
        first = tirx.max(behind - number(plan.reach(axis)), number(0)) + number(plan.stride[axis] - 1)
        last = tirx.min(tirx.truncdiv(behind, stride), number(plan.windows[axis] - 1))
        return e.name_index(tirx.truncdiv(first, stride), "first"), e.name_index(last, "last")

    def _added(self, total: Buffer, vector: Expr, place: Expr, dtype: str) -> list[Stmt]:
        """Adds a window's gradients to those of the elements that are its maxima."""
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
        """Where a vector's elements lie."""
        return vector_at(vector * self.number(self.lanes), self.lanes)
