"""Reduction order: extents → stages, accumulators and the order in which they are combined.

It follows from the extents alone, never from the kernel the reduction ends up in.

* A *row* of ``n`` elements: ``unroll(n)`` vector accumulators of 16 lanes take the vectors in turn, are combined
  pairwise, then the halves of the one vector are combined until one lane is left; the last ``n % 16`` elements go into
  a scalar accumulator of their own, which is added at the end.
* A *column* of ``n`` elements: consecutive rows in ``column_chunks`` chunks, each accumulated in order, then the
  chunks in order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tvm import tirx
from tvm.tirx import Expr

from bridge.compile.codegen.emit import LANES, Emitter, element_type
from bridge.compile.codegen.pointwise import maximum, minimum

__all__ = ["chunk_rows", "column_chunks", "combine", "fold_lanes", "identity", "reduction_stages", "unroll"]

_CHUNK_ELEMENTS = 16384  # work of a chunk: microseconds, so that starting threads is worth it
_MAX_CHUNKS = 32  # enough for the threads of one socket; the chunks are combined serially
_MIN_ROWS = 8

_SPLIT_REDUCTION = 8192
"""A reduction of twice this many elements or more with few results is done in two stages, so that it can run in
parallel."""


def unroll(length: int) -> int:
    """Number of vector accumulators of a row of ``length`` elements: hides the latency of the addition."""
    vectors = length // LANES
    return next(n for n in (4, 2, 1) if vectors % n == 0)


def column_chunks(rows: int, columns: int) -> int:
    """Number of chunks of a column reduction over ``rows`` rows of ``columns`` elements."""
    chunks = max(1, min(_MAX_CHUNKS, rows // _MIN_ROWS, rows * columns // _CHUNK_ELEMENTS))
    return -(-rows // chunk_rows(rows, chunks))


def chunk_rows(rows: int, chunks: int) -> int:
    """Rows per chunk; the last chunk may have fewer."""
    return -(-rows // chunks)


def reduction_stages(extents: Sequence[int], axes: Collection[int]) -> list[tuple[int, int, int]]:
    """A reduction over ``axes`` → ``(outer, reduced, inner)`` of the reductions that make it, one after another.

    The innermost axes go first. Neighbouring axes of one kind are one axis; a long reduction with few results is done
    in two stages, so that it can run in parallel. Empty where all reduced axes have extent 1.
    """
    runs: list[tuple[bool, int]] = []  # alternating: remaining, reduced, remaining, …
    for axis, extent in enumerate(extents):
        if extent == 1:
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
        part = _first_stage(outer, length, inner)
        if part:
            runs[position : position + 1] = [(True, length // part), (True, part)]
            continue
        stages.append((outer, length, inner))
        del runs[position]
    return stages


def _first_stage(outer: int, length: int, inner: int) -> int:
    """Elements that the first of two stages reduces; 0 for one stage."""
    if inner != 1 or outer >= 16 or length < 2 * _SPLIT_REDUCTION:
        return 0
    divisors = (part for part in range(_SPLIT_REDUCTION, 255, -1) if length % part == 0)
    return next(divisors, 0)


def identity(op: str, dtype: str) -> float:
    """What a reduction of nothing gives. ``max`` and ``min`` start from the type's ends."""
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if "float" in dtype:
        return -math.inf if op == "max" else math.inf
    bound = tirx.min_value(dtype) if op == "max" else tirx.max_value(dtype)
    return int(bound.value)


def combine(e: Emitter, op: str, a: Expr, b: Expr) -> Expr:
    """One step of a reduction: ``a`` is the accumulator."""
    match op:
        case "sum":
            return tirx.Add(a, b)
        case "prod":
            return tirx.Mul(a, b)
        case "max":
            return maximum(e, a, b)
        case "min":
            return minimum(e, a, b)
    raise NotImplementedError(f"no reduction is called {op!r}")


def fold_lanes(e: Emitter, op: str, vector: Expr) -> Expr:
    """One lane from a vector of 16, by halves."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        vector = e.bind(vector)
        low = e.bind(tirx.Shuffle([vector], list(range(lanes))))
        high = e.bind(tirx.Shuffle([vector], list(range(lanes, 2 * lanes))))
        vector = combine(e, op, low, high)
    return e.bind(vector, element_type(vector)[0])
