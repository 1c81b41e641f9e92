"""Launches: a statement of one thread → the nest of blocks and threads that runs it."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Range
from tvm.tirx import AttrStmt, Evaluate, Expr, IfThenElse, IterVar, Stmt, Var

__all__ = ["launch", "synchronize"]


def launch(blocks: Expr, threads: int, groups: int, body: Callable[[Var, Var, Var], Stmt]) -> Stmt:
    """``body(block, group, thread)`` for all; nothing if there are no blocks.

    Threads of a group are neighbours: a warp holds whole groups, or a group whole warps.
    """
    index_type = str(blocks.ty)
    extents = {
        "blockIdx.x": blocks,
        "threadIdx.y": _const(groups, index_type),
        "threadIdx.x": _const(threads, index_type),
    }
    variables = [Var(name, index_type) for name in ("block", "group", "thread")]
    nest = body(*variables)
    for (tag, extent), variable in reversed(list(zip(extents.items(), variables, strict=True))):
        axis = IterVar(Range(_const(0, index_type), extent), variable, IterVar.ThreadIndex, tag)
        nest = AttrStmt(axis, "thread_extent", extent, nest)
    return IfThenElse(tirx.GT(blocks, _const(0, index_type)), nest, None)


def synchronize() -> Stmt:
    """A barrier of the block's threads."""
    return Evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "shared"))


def _const(number: int, index_type: str) -> Expr:
    return tirx.const(number, index_type)
