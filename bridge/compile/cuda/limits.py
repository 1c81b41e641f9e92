"""The GPU's limits and its order of reductions.

The order of a row: :func:`row_threads` threads share it. Thread ``t`` takes the vectors ``t, t + threads, …`` of
:func:`row_lanes` elements; each lane has an accumulator of its own, and these are combined by halves. Then the threads
of each warp are combined by halves, then the warps. If all rows together have few elements
(:attr:`ReductionOrder.small_rows`), each vector has a thread, and in short rows a vector is one element. A column: each
chunk's rows are distributed over :func:`row_groups` groups in turn, whose sums are combined by halves; then the chunks,
distributed over :data:`SECOND_STAGE_LANES` threads. The order follows from the extents.
"""

from __future__ import annotations

import math

from bridge.compile.loop_ir.operations import Number
from bridge.compile.schedule.limits import Limits
from bridge.compile.schedule.order import ReductionOrder

__all__ = ["ACCESS_BYTES", "BLOCK_THREADS", "COLUMN_LANES", "FEW_ROWS", "SECOND_STAGE_LANES"]
__all__ += ["FLOAT64_ARCHITECTURES", "LIMITS", "ORDER", "ROWS_THREADS", "SHARED_BYTES", "VECTOR", "WARP"]
__all__ += ["row_groups", "row_lanes", "row_threads"]

VECTOR = 4
"""Elements that a thread takes at once: 16 bytes of float32, the widest access."""

ACCESS_BYTES = 16
"""Bytes of a thread's widest access."""

WARP = 32
"""Threads that exchange values directly, and read adjacent memory at once."""

BLOCK_THREADS = 256
"""Threads of a block, unless it is one long row."""

ROWS_THREADS = 128
"""Threads of a block with independent rows or elements: with fewer threads, its place is free again sooner."""

SHARED_BYTES = 49_152
"""Maximum bytes of all arrays of a block together: NVRTC refuses a kernel that declares more."""

_MOST_THREADS = 1024
_SHORT = 512  # elements of a row: enough threads that each has enough registers
_MOST_GROUPS = 32  # whose sums one thread combines
_TIMES_GROUPS = ((1, 4), (5, 2))
"""(vectors of a thread at most, factor of the number of groups) for rows whose columns are reduced: with fewer vectors,
fewer of the block's registers hold the columns' sums."""
_VECTORS_PER_THREAD = 8  # in registers: 32 numbers of each cached value

SECOND_STAGE_LANES = 16
"""Threads that combine the chunks' partials of one column."""

FEW_ROWS = 32
"""One thread adds a column of fewer rows, :data:`COLUMN_LANES` threads a longer one that is not cut into chunks."""

COLUMN_LANES = 8

FLOAT64_ARCHITECTURES = frozenset(("sm_60", "sm_70", "sm_80", "sm_90", "sm_100"))
"""Architectures with float64 at half the rate of float32 (others: a 64th), where memory limits sums in either type."""

# A chunk is about one block's simultaneous work: the few rows of a small LayerNorm are spread over many blocks.
ORDER = ReductionOrder(
    lanes=VECTOR,
    interleaved=(1,),
    chunk_elements=2560,
    chunk_rows=1,
    most_chunks=132,
    whole_rows=264,
    whole_columns=16_384,  # enough threads
    split=8192,
    small_rows=2**17,
)

LIMITS = Limits.of(
    summed_sections=2,  # adjacent threads in different sections wait for each other
    cheap_in_known_rows=0,  # cached in registers
    cheap_shared=4,
    tasks=1024,
    column_vectors=1,
    section_elements=2**18,
    access_bytes=ACCESS_BYTES,
    single_elements=2**17,
    together=8,
    small_casts=8,
)


def row_lanes(length: Number, small: bool = False) -> int:
    """Elements of a vector of a row; rows whose length is not divisible by it are misaligned.

    ``small``: all rows together have few elements; then a short row has one element per thread.
    """
    if not isinstance(length, int) or (small and length <= _SHORT):
        return 1
    return math.gcd(length, VECTOR)


def row_threads(length: Number, small: bool = False) -> int:
    """Threads that share a row, a power of two; for a dynamic length, a whole block.

    If a dynamic length is short at a launch, a warp takes the row (:meth:`bridge.compile.cuda.row.RowVariant.short`).
    """
    if not isinstance(length, int):
        return BLOCK_THREADS
    vectors = max(1, length // row_lanes(length, small))
    wanted = min(vectors, max(WARP, -(-vectors // (1 if small else _VECTORS_PER_THREAD))))
    return min(_MOST_THREADS, 1 << (wanted - 1).bit_length())


def row_groups(length: Number, small: bool = False, columns: bool = False) -> int:
    """Groups of threads in a block, each on a row of its own.

    More groups for ``columns`` of short rows: there are no more blocks than chunks, and each needs loads in flight."""
    threads = row_threads(length, small)
    if not columns:
        return max(1, ROWS_THREADS // threads)
    groups = max(1, BLOCK_THREADS // threads)
    if not isinstance(length, int):
        return groups
    turns = -(-length // (threads * row_lanes(length, small)))
    times = next((times for most, times in _TIMES_GROUPS if turns <= most), 1)
    return max(groups, min(_MOST_GROUPS, _MOST_THREADS // threads, groups * times))  # a power of two
