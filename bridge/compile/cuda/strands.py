"""Strands: what is to be combined along a column, dealt to several threads, each in order; then these by halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import BufferLoad, BufferStore, Expr, For, ForKind, Stmt, Var

from bridge.compile.codegen.tir import LaunchArguments, sequence
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer
from bridge.compile.cuda.launch import SharedMemory, synchronize
from bridge.compile.cuda.limits import WARP
from bridge.compile.cuda.tree import Halved, halve
from bridge.compile.schedule.reduction import combine, identity

__all__ = ["Strands"]


@dataclass(frozen=True)
class Strands:
    """``count`` strands, a power of two, for each of a warp of columns.

    Attributes:
        strand, column: which one of the block this thread is.
        shared: a buffer with an element for each thread.
    """

    count: int
    strand: Expr
    column: Expr
    number: LaunchArguments
    shared: SharedMemory

    @property
    def leads(self) -> Expr:
        """Whether this thread has the total."""
        return tirx.EQ(self.strand, self.number(0))

    def combined(
        self, op: str, dtype: str, part: Callable[[CudaEmitter, Expr], Expr], parts: Expr
    ) -> tuple[list[Stmt], Expr]:
        """Statements that combine ``part(emitter, index)`` for all indices, and the leading thread's total."""
        number, e = self.number, CudaEmitter()
        turn = Var("turn", number.index_type)
        acc, allocation = local_buffer(1, dtype, "acc")
        at, inside = [number(0)], CudaEmitter()
        index = inside.name_index(turn * number(self.count) + self.strand, "part")
        value = inside.bind(part(inside, index))
        inside.stmts.append(BufferStore(acc, combine(inside, op, BufferLoad(acc, at), value), at))
        turns = tirx.truncdiv(parts - self.strand + number(self.count - 1), number(self.count))
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

        stmts += [synchronize(), BufferStore(shared, BufferLoad(acc, at), [place(self.strand)])]
        stmts += halve([Halved(op, shared, place)], self.count, self.strand, number)
        return stmts, BufferLoad(shared, [place(number(0))])
