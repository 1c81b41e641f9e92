"""Launches: a statement of one thread → the nest of blocks and threads that runs it."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Range
from tvm.tirx import AllocBuffer, AttrStmt, Buffer, Evaluate, Expr, IfThenElse, IterVar, Stmt, Var

from bridge.compile.codegen.tir import sequence

__all__ = ["SharedMemory", "launch", "portions", "synchronize"]


class SharedMemory:
    """Memory of a block: buffers of its size, or of another, which users have to themselves between two barriers."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: dict[tuple[str, int, int], Buffer] = {}

    def __call__(self, dtype: str, index: int = 0, size: int | None = None) -> Buffer:
        """The buffer of a type, index and size."""
        key = dtype, index, self._size if size is None else size
        if key not in self._buffers:
            name = f"shared{len(self._buffers)}"
            self._buffers[key] = tirx.decl_buffer((key[2],), dtype, name, scope="shared")
        return self._buffers[key]

    @property
    def allocations(self) -> list[Stmt]:
        """What declares them, for the beginning of the kernel."""
        return [AllocBuffer(buffer) for buffer in self._buffers.values()]


def launch(
    blocks: Expr,
    threads: int,
    groups: int,
    body: Callable[[Var, Var, Var], Stmt],
    shared: SharedMemory | None = None,
) -> Stmt:
    """``body(block, group, thread)`` for all, with memory that it may ask for; nothing if there are no blocks.

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
    if shared is not None:
        nest = sequence([*shared.allocations, nest])
    for (tag, extent), variable in reversed(list(zip(extents.items(), variables, strict=True))):
        axis = IterVar(Range(_const(0, index_type), extent), variable, IterVar.ThreadIndex, tag)
        nest = AttrStmt(axis, "thread_extent", extent, nest)
    return IfThenElse(tirx.GT(blocks, _const(0, index_type)), nest, None)


def portions(count: Expr, size: int) -> Expr:
    """How many times ``size`` cover ``count``; for counts up to the end of their type."""
    of, one = _const(size, str(count.ty)), _const(1, str(count.ty))
    return tirx.truncdiv(count, of) + tirx.min(tirx.truncmod(count, of), one)


def synchronize() -> Stmt:
    """A barrier of the block's threads."""
    return Evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "shared"))


def _const(number: int, index_type: str) -> Expr:
    return tirx.const(number, index_type)
