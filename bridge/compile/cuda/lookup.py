"""Rows of a table at indices: a plan → a thread for each of a few vectors of the result.

An index outside of the table ends the process' work on the GPU, as a failed assertion in eager's kernel does.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx import BufferLoad, BufferStore, Evaluate, Expr, IfThenElse, PrimFunc, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer, loop_function, sequence
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer, storage_type, vector_at
from bridge.compile.cuda.launch import launch, portions
from bridge.compile.cuda.limits import ACCESS_BYTES, BLOCK_THREADS
from bridge.compile.loop_ir.operations import LookupPlan

__all__ = ["lookup"]

_TOGETHER = 4
"""Vectors that a thread asks for at once, where there are enough for all of a GPU's threads."""

_ENOUGH = 2**20
"""Vectors that are."""


def lookup(plan: LookupPlan) -> PrimFunc:
    """The kernel: the table, indices, the result."""
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
        """Of the table, for a vector of the result."""
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
