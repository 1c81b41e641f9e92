"""Task parts: what the groups of a block have of a column reduction → the task's part of it, in memory.

The groups put their numbers into shared memory; then each group takes whole vectors of columns, combines what all
groups have of them by halves, and stores the result. A column's combination is one thread's and its order follows from
the number of groups alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt

from autodiff.ir import itemsize
from bridge.compile.codegen.tir import LaunchArguments, sequence
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer, vector_at
from bridge.compile.cuda.launch import SharedMemory, synchronize
from bridge.compile.cuda.limits import ACCESS_BYTES
from bridge.compile.cuda.row import RowForm
from bridge.compile.loop_ir.operations import Number
from bridge.compile.schedule.reduction import combine

__all__ = ["TaskParts"]


class TaskParts:
    """Storing of a block's parts.

    Args:
        form: of the rows, with a bound for how many turns there are.
        group, thread: which one of the block this is.
        task: which part it is.
        length: elements of a row.
        together: turns whose parts shared memory has room for at once
            (:func:`bridge.compile.cuda.shared_bytes.turns_together`).
    """

    def __init__(
        self,
        form: RowForm,
        number: LaunchArguments,
        shared: SharedMemory,
        group: Expr,
        thread: Expr,
        task: Expr,
        length: Number,
        together: int,
    ) -> None:
        self.form, self.number, self.shared = form, number, shared
        self.group, self.thread = group, thread
        self.task, self.length, self.room = task, length, together
        self.turns = [(form.tile, 0)]
        if form.tile is None:
            self.turns = [(number(turn), turn) for turn in range(form.turns)]

    def stored(self, kept: Buffer, memory: Buffer, op: str) -> list[Stmt]:
        """What each thread has in ``kept``, combined, in ``memory``."""
        form, dtype = self.form, str(kept.dtype)
        width = min(form.lanes, ACCESS_BYTES // itemsize(dtype))
        if form.groups == 1:
            return [
                self._inside(turn, self._copies(kept, self._kept(index, width), memory, self._places(turn, width)))
                for turn, index in self.turns
            ]
        most, stmts = min(self.room, len(self.turns)), []
        for first in range(0, len(self.turns), most):
            stmts += self._together(kept, memory, op, self.turns[first : first + most], width, most)
        return stmts

    def _together(
        self, kept: Buffer, memory: Buffer, op: str, turns: list[tuple[Expr, int]], width: int, room: int
    ) -> list[Stmt]:
        """The parts of some turns, between the same barriers, in shared memory with room for so many."""
        form, number, dtype = self.form, self.number, str(kept.dtype)
        shared = self.shared(dtype, size=room * form.groups * form.threads * form.lanes)
        stmts: list[Stmt] = [synchronize()]
        for at, (_, index) in enumerate(turns):
            stmts += self._copies(kept, self._kept(index, width), shared, self._shared(number(at), self.group, width))
        stmts.append(synchronize())
        for first in range(0, len(turns), form.groups):
            some = len(turns) - first
            at = number(first) + self.group
            turn = turns[0][0] if len(turns) == 1 else turns[first][0] + self.group
            inside = self._inside(turn, self._combined(shared, memory, op, at, turn, width))
            stmts.append(inside if some >= form.groups else IfThenElse(self.group < number(some), inside, None))
        return stmts

    def _combined(self, shared: Buffer, memory: Buffer, op: str, at: Expr, turn: Expr, width: int) -> list[Stmt]:
        """All groups' numbers of one turn, by halves."""
        form, number, dtype, e = self.form, self.number, str(shared.dtype), CudaEmitter()
        locals_ = []
        for member in range(form.groups):
            local, allocation = local_buffer(form.lanes, dtype, "x")
            e.stmts.append(allocation)
            e.stmts += self._copies(shared, self._shared(at, number(member), width), local, self._kept(0, width))
            locals_.append(local)
        half = form.groups
        while half > 1:
            half //= 2
            for local, other in zip(locals_[:half], locals_[half : 2 * half], strict=True):
                for lane in range(form.lanes):
                    place = [number(lane)]
                    both = BufferLoad(local, place), BufferLoad(other, place)
                    e.stmts.append(BufferStore(local, combine(e, op, *both), place))
        return [*e.stmts, *self._copies(locals_[0], self._kept(0, width), memory, self._places(turn, width))]

    def _inside(self, turn: Expr, stmts: list[Stmt]) -> Stmt:
        """Statements for a turn's columns, as far as there are any."""
        form, number = self.form, self.number
        if form.turns is not None and form.turns * form.threads * form.lanes == self.length:
            return sequence(stmts)
        position = (turn * number(form.threads) + self.thread) * number(form.lanes)
        return IfThenElse(position < number(self.length), sequence(stmts), None)

    def _copies(self, source: Buffer, there: Iterator[Expr], target: Buffer, here: Iterator[Expr]) -> list[Stmt]:
        """One vector, access by access."""
        return [BufferStore(target, BufferLoad(source, [a]), [b]) for a, b in zip(there, here, strict=True)]

    def _kept(self, index: int, width: int) -> Iterator[Expr]:
        """Where a thread has its ``index``-th vector."""
        number, lanes = self.number, self.form.lanes
        return (vector_at(number(index * lanes + first), width) for first in range(0, lanes, width))

    def _shared(self, at: Expr, group: Expr, width: int) -> Iterator[Expr]:
        """Where a group's vector lies in shared memory."""
        number, form = self.number, self.form
        vector = (at * number(form.groups) + group) * number(form.threads) + self.thread
        return self._pieces(vector, width)

    def _places(self, turn: Expr, width: int) -> Iterator[Expr]:
        """Where the vector of a turn lies in the task's part."""
        number, form = self.number, self.form
        vectors = self.length // form.lanes if isinstance(self.length, int) else self.length  # whose lanes are one
        vector = self.task * number(vectors) + turn * number(form.threads) + self.thread
        return self._pieces(vector, width)

    def _pieces(self, vector: Expr, width: int) -> Iterator[Expr]:
        """Accesses of a vector of that index, written as multiples of their width: see :mod:`.step`."""
        number, pieces = self.number, self.form.lanes // width
        first = vector if pieces == 1 else vector * number(pieces)
        return (vector_at((first + number(piece)) * number(width), width) for piece in range(pieces))
