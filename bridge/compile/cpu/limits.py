"""The CPU's limits and its order of reductions: numbers that were found by measuring, on machines with AVX-512."""

from __future__ import annotations

from bridge.compile.schedule.choices import LIMITS as OF_LIMITS
from bridge.compile.schedule.choices import ORDER as OF_ORDER
from bridge.compile.schedule.choices import Alternative
from bridge.compile.schedule.limits import Limits
from bridge.compile.schedule.order import ReductionOrder

__all__ = ["ALTERNATIVES", "LANES", "LIMITS", "ORDER"]

LANES = 16
"""Vector width of every generated loop, whatever the element type or the processor: 16 float32 fill one AVX-512
register, and the compiler splits wider vectors into several registers. It is fixed because the order of a
reduction follows from it: results must not depend on the machine's vector width."""

ORDER = ReductionOrder(
    lanes=LANES,
    interleaved=(4, 2, 1),
    chunk_elements=16_384,  # microseconds, so that starting threads is worth it
    chunk_rows=8,
    most_chunks=32,  # enough for the threads of one socket
    split=8192,
    block_rows=64,  # a block costs as much as a row and a half
)

LIMITS = Limits(
    nodes=80,
    buffers=48,
    terms=16,
    sections=16,
    summed_sections=16,
    serial_elements=32_768,
    shared_elements=4096,
    loops=8,
    flat_row=4096,
    short_row=256,
    cheap_operations=4,
    cheap_in_known_rows=4,
    cheap_shared=0,
    parallel_work=250_000,  # ten microseconds in vectors, where a launch costs two or three
    parallel_steps=100_000,  # a step's threads have not gone to sleep
    parallel_columns=150_000,
    parallel_finish=32_768,
    parallel_legalized=16_384,
    transcendental_work=12,
    tasks=64,
    column_vectors=4,
    joined_sections=8,
    joined_rows=8,
    section_operators=4,
    section_elements=0,
    placed_sections=8,
    parts_apart=8,
    free_reads=4,
    access_bytes=0,
    single_elements=0,
    together=1,
    small_casts=0,
    read_again=0,
    added_rows=0,
    streams=1,
)

ALTERNATIVES = (
    Alternative(OF_LIMITS, "cheap_in_known_rows", (0, 2, 8, 16)),
    Alternative(OF_LIMITS, "tasks", (16, 32, 128, 256)),
    Alternative(OF_ORDER, "lanes", (32, 8)),
    Alternative(OF_ORDER, "interleaved", ((8, 4, 2, 1), (2, 1), (1,))),
    Alternative(OF_LIMITS, "column_vectors", (1, 2, 8)),
    Alternative(OF_LIMITS, "nodes", (16, 32, 160)),
    Alternative(OF_LIMITS, "buffers", (12, 24, 96)),
    Alternative(OF_ORDER, "most_chunks", (8, 16, 64)),
    Alternative(OF_ORDER, "chunk_elements", (4096, 65_536)),
    Alternative(OF_LIMITS, "flat_row", (1024, 2048, 16_384)),
    Alternative(OF_LIMITS, "short_row", (64, 128, 512, 1024)),
    Alternative(OF_LIMITS, "parallel_work", (60_000, 1_000_000)),
    Alternative(OF_LIMITS, "parallel_steps", (30_000, 250_000)),
    Alternative(OF_LIMITS, "parallel_columns", (40_000, 600_000)),
    Alternative(OF_LIMITS, "shared_elements", (512, 65_536)),
    Alternative(OF_LIMITS, "serial_elements", (8192, 131_072)),
    Alternative(OF_LIMITS, "terms", (8, 32)),
    Alternative(OF_LIMITS, "joined_sections", (1, 16)),
    Alternative(OF_LIMITS, "section_operators", (1, 12)),
    Alternative(OF_LIMITS, "placed_sections", (0,)),
)
"""What tuning tries. A vector of 32 lanes is two registers of AVX-512; 8 are one of AVX2."""
