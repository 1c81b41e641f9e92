"""Reduction order: extents → stages, accumulators and chunks, which fix the order in which elements are combined.

It follows from the extents alone, never from the reduction's kernel.

* A *row* of ``n`` elements: ``accumulators(n)`` vector accumulators take the vectors in turn and are combined pairwise,
  then the halves of the one vector are combined until one lane is left; the last ``n % lanes`` elements go into a
  scalar accumulator of their own, which is added at the end. More than twice ``block_turns`` turns are accumulated in
  blocks of ``block_turns``, then the blocks in order.
* A *column* of ``n`` elements: consecutive rows in ``column_chunks`` chunks, each accumulated in order, then the
  chunks in order. A chunk of more than twice ``block_rows`` rows is accumulated in blocks of ``block_rows``, each in
  order, then the blocks in order: the rounding error grows with the rows of a block, the blocks and the chunks.

A dynamic extent has the order of its value: the launch determines the numbers of accumulators and chunks. Bits may
differ between a static and a dynamic entry only in a sum of two stages (:meth:`ReductionOrder.stages`), in small rows
(:attr:`ReductionOrder.small_rows`) and in columns of few rows (:attr:`ReductionOrder.whole_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autodiff.extents import Dim, Extent, at_most, below, content, divides, maximum, minimum, same

__all__ = ["ReductionOrder", "chunk_rows"]


def chunk_rows(rows: Dim, chunks: Dim) -> Dim:
    """Rows per chunk, at least one; the last chunk may have fewer."""
    return maximum(1, (rows + chunks - 1) // chunks)


@dataclass(frozen=True)
class ReductionOrder:
    """A backend's order of reductions. Another order rounds differently, so it is part of the backend's key.

    Attributes:
        lanes: vector width of every generated loop; a power of two, as are the numbers in ``interleaved``.
        interleaved: candidate numbers of vector accumulators of a row; the first that divides its vectors is used.
            Several accumulators hide the latency of the addition.
        chunk_elements, chunk_rows: minimum work, and rows, of a chunk of a column.
        most_chunks: maximum per column; they are combined serially.
        whole_rows, whole_columns: maximum rows and minimum columns of a column reduction in one chunk. Each of these
            columns may have a thread, and partials of so few rows would be about as many bytes as the rows.
        split: maximum elements that the first of two stages reduces; a row of twice as many, with few results, is
            reduced in two stages, for parallelism.
        block_rows: of a block of a chunk; 0: a chunk is one block, or the backend's kernels have an order of their own.
        block_turns: the same for the turns of a row's accumulators.
        small_rows: elements of all rows together up to which many threads share a row; 0: none. Not for dynamic sizes.
    """

    lanes: int
    interleaved: tuple[int, ...]
    chunk_elements: int
    chunk_rows: int
    most_chunks: int
    split: int
    small_rows: int = 0
    block_rows: int = 0
    block_turns: int = 0
    whole_rows: int = 0
    whole_columns: int = 0

    def __post_init__(self) -> None:
        for number in (self.lanes, *self.interleaved):
            if number < 1 or number & (number - 1):
                raise ValueError(f"lanes and interleaved: wanted powers of two, got {number}")

    def accumulators(self, length: int) -> int:
        """Number of vector accumulators of a row of ``length`` elements."""
        vectors = length // self.lanes
        return next((number for number in self.interleaved if vectors % number == 0), 1)

    def possible_accumulators(self, length: Dim) -> tuple[int, ...]:
        """Possible results of :meth:`accumulators`; the first that divides the number of vectors is used."""
        if not isinstance(length, Extent):
            return (self.accumulators(length),)
        vectors = length // self.lanes
        possible: list[int] = []
        for number in (*self.interleaved, 1):
            possible.append(number)
            if divides(number, vectors):
                break
        return tuple(possible)

    def blocked(self, length: Dim) -> int:
        """Turns of a block of a row of ``length`` elements; 0: it is one block."""
        turn = self.lanes * min(self.possible_accumulators(length))
        return 0 if at_most(length, 2 * self.block_turns * turn) else self.block_turns

    def column_chunks(self, rows: Dim, columns: Dim) -> Dim:
        """Number of chunks of a column reduction over ``rows`` rows of ``columns`` elements."""
        if at_most(rows, self.whole_rows) and at_most(self.whole_columns, columns):
            return 1
        most = minimum(rows // self.chunk_rows, rows * columns // self.chunk_elements)
        chunks = maximum(1, minimum(self.most_chunks, most))
        size = chunk_rows(rows, chunks)
        return maximum(1, (rows + size - 1) // size)

    def stages(self, extents: Sequence[Dim], axes: Collection[int]) -> list[tuple[Dim, Dim, Dim]]:
        """A reduction over ``axes`` → ``(outer, reduced, inner)`` of the successive reductions that make it.

        The innermost axes go first. Neighbouring axes of one kind merge; a long reduction with few results is done in
        two stages, for parallelism. Empty if all reduced axes have extent 1.

        The first stage reduces the largest divisor of the length that is at most ``split``; for a dynamic length, the
        largest number that divides it at all sizes.
        """
        runs: list[tuple[bool, Dim]] = []  # alternating: remaining, reduced, remaining, …
        for axis, extent in enumerate(extents):
            if same(extent, 1):
                continue
            if runs and runs[-1][0] == (axis in axes):
                runs[-1] = (runs[-1][0], runs[-1][1] * extent)
            else:
                runs.append((axis in axes, extent))
        stages = []
        while any(reduced for reduced, _ in runs):
            position = max(i for i, (reduced, _) in enumerate(runs) if reduced)
            outer = math.prod(extent for _, extent in runs[:position])
            length = runs[position][1]
            inner = math.prod(extent for _, extent in runs[position + 1 :])
            part = self._first_stage(outer, length, inner)
            if part:
                runs[position : position + 1] = [(True, length // part), (True, part)]
                continue
            stages.append((outer, length, inner))
            del runs[position]
        return stages

    def _first_stage(self, outer: Dim, length: Dim, inner: Dim) -> int:
        """Elements that the first of two stages reduces; 0 for one stage."""
        if not same(inner, 1) or not below(outer, 16) or below(length, 2 * self.split):
            return 0
        number = content(length)
        return next((part for part in range(self.split, 255, -1) if number % part == 0), 0)
