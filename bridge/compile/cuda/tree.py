"""Trees over threads: a value of each thread → one value that all of them hold, combined by halves.

Element ``i`` is combined with element ``i + half``, for halves of ever smaller size, the lower one being the
accumulator. The plain form does it in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt

from bridge.compile.codegen.arguments import LaunchArguments
from bridge.compile.codegen.tir import sequence
from bridge.compile.cuda.emitter import CudaEmitter
from bridge.compile.cuda.launch import SharedMemory, synchronize
from bridge.compile.schedule.reduction import combine

__all__ = ["Halved", "Team", "halve"]


@dataclass(frozen=True)
class Halved:
    """Something that is combined: by which operation, in which shared buffer, where a member's element is."""

    op: str
    buffer: Buffer
    place: Callable[[Expr], Expr]


def halve(parts: Sequence[Halved], count: int, member: Expr, number: LaunchArguments) -> list[Stmt]:
    """Combines the members' elements into the first one's, which all threads may read behind it."""
    stmts: list[Stmt] = [synchronize()]
    while count > 1:
        count //= 2
        e = CudaEmitter()
        for part in parts:
            mine, other = (BufferLoad(part.buffer, [part.place(at)]) for at in (member, member + number(count)))
            e.stmts.append(BufferStore(part.buffer, combine(e, part.op, mine, other), [part.place(member)]))
        stmts += [IfThenElse(member < number(count), sequence(e.stmts), None), synchronize()]
    return stmts


@dataclass(frozen=True)
class Team:
    """The threads of a group, which combine what each has of a row.

    Attributes:
        threads: how many, a power of two.
        group, thread: which one of the block this is.
        shared: a buffer for each combination at a time, an element for each thread.
    """

    threads: int
    group: Expr
    thread: Expr
    number: LaunchArguments
    shared: SharedMemory

    def totals(self, e: CudaEmitter, parts: Sequence[tuple[str, str, Expr]]) -> list[Expr]:
        """Of each ``(op, type, value)``, all threads' values combined."""
        if self.threads == 1 or not parts:
            return [value for _, _, value in parts]
        first = self.group * self.number(self.threads)
        halved = []
        e.stmts.append(synchronize())
        for index, (op, dtype, value) in enumerate(parts):
            buffer = self.shared(dtype, index)
            e.stmts.append(BufferStore(buffer, value, [first + self.thread]))
            halved.append(Halved(op, buffer, lambda member: first + member))
        e.stmts += halve(halved, self.threads, self.thread, self.number)
        return [e.bind(BufferLoad(part.buffer, [first]), "total") for part in halved]
