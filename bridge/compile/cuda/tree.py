"""Trees over threads: a value of each thread → one value that all of them hold, combined by halves.

Element ``i`` is combined with element ``i + half``, for halves of ever smaller size, the lower one being the
accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt

from bridge.compile.codegen.emit import element_type
from bridge.compile.codegen.tir import LaunchArguments, sequence
from bridge.compile.cuda.emitter import CudaEmitter
from bridge.compile.cuda.launch import SharedMemory, synchronize
from bridge.compile.cuda.limits import WARP
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
    for half in _halves(count):
        stmts += _step(parts, half, member, member < number(half), number)
    return stmts


def _halves(count: int) -> list[int]:
    """``count / 2, …, 2, 1``."""
    return [1 << bit for bit in reversed(range(max(count, 1).bit_length() - 1))]


def _step(parts: Sequence[Halved], half: int, member: Expr, active: Expr, number: LaunchArguments) -> tuple[Stmt, Stmt]:
    """The elements of active members with those ``half`` behind them; a barrier."""
    e = CudaEmitter()
    for part in parts:
        mine, other = (BufferLoad(part.buffer, [part.place(at)]) for at in (member, member + number(half)))
        e.stmts.append(BufferStore(part.buffer, combine(e, part.op, mine, other), [part.place(member)]))
    return IfThenElse(active, sequence(e.stmts), None), synchronize()


@dataclass(frozen=True)
class Team:
    """The threads of a group, which combine what each has of a row.

    Threads of a warp first, by halves, then the warps by halves. CUDA's form exchanges between threads of a warp
    directly; the plain form does the same steps in shared memory.

    Attributes:
        threads: how many, a power of two.
        group, thread: which one of the block this is.
        shared: a buffer for each combination at a time, an element for each warp of the block, which has no more of
            them than a warp has threads; in the plain form for each thread.
        plain: whether to take the plain form.
    """

    threads: int
    group: Expr
    thread: Expr
    number: LaunchArguments
    shared: SharedMemory
    plain: bool

    def totals(self, e: CudaEmitter, parts: Sequence[tuple[str, str, Expr]]) -> list[Expr]:
        """Of each ``(op, type, value)``, all threads' values combined."""
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
        """The values of ``count`` neighbours in a warp, combined by halves in each of them."""
        for half in _halves(count):
            value, dtype = e.bind(value), element_type(value)
            other = e.bind(tirx.call_pure_extern(dtype, "bridge_shuffle_xor", value, tirx.const(half, "int32")))
            if op in ("sum", "prod") or dtype != "float64":  # in either order the same
                value = e.bind(combine(e, op, value, other))
                continue
            lower = tirx.EQ(tirx.bitwise_and(self.thread, self.number(half)), self.number(0))
            pair = (tirx.Select(lower, value, other), tirx.Select(lower, other, value))
            value = e.bind(combine(e, op, *map(e.bind, pair)))
        return value
