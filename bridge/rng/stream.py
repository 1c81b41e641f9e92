"""Chunks of a stream of masks: sizes, thresholds, a number of threads → the tables that compiled draws read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bridge.compile import PER_BLOCK
from bridge.rng.polynomials import power, terms, times

__all__ = ["Stream", "chunks_of", "stream"]

_JUMP = 2000
"""A jump to a chunk takes as long as this many blocks of a mask, 0.15 ms on Zen 5."""

_LEAST = 1000
"""Blocks that a thread jumps for."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Tables of int64, and of uint16 for the terms; see :func:`bridge.compile.bernoulli_function`."""

    count: int
    chunks: np.ndarray = field(repr=False)
    segments: np.ndarray = field(repr=False)
    terms: np.ndarray = field(repr=False)

    @functools.cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of the tables, and the number of chunks: the last arguments of a compiled draw."""
        return self.chunks.ctypes.data, self.segments.ctypes.data, self.terms.ctypes.data, self.count


def chunks_of(elements: int, threads: int) -> list[int]:
    """Where chunks begin, in blocks: one a thread, all of a size but for the first, which needs no jump, and the last.

    There are eight sizes from one power of two to the next, so that masks of many sizes share the jumps, each of which
    takes some 20 ms to find.
    """
    blocks = -(-elements // PER_BLOCK)
    count = min(threads, (blocks - _JUMP) // _LEAST)
    if count < 2:
        return [0]
    size = -(-(blocks - _JUMP) // count)
    step = 1 << max(0, size.bit_length() - 4)
    size = -(-size // step) * step
    return [0, *range(size + _JUMP, blocks, size)]


def stream(sizes: Sequence[tuple[int, int]], threads: int) -> Stream:
    """How to draw masks of ``(elements, threshold)`` one after the other on so many threads."""
    elements = sum(count for count, _ in sizes)
    begins = chunks_of(elements, threads)
    exponents, places = _terms(tuple(begins))
    edges = [begin * PER_BLOCK for begin in begins] + [elements]
    chunks, segments = [], []
    for chunk, (begin, end) in enumerate(pairwise(edges)):
        first, passed = len(segments), 0
        for number, (count, threshold) in enumerate(sizes):
            low, high = max(begin - passed, 0), min(end - passed, count)
            if low < high:
                segments.append((number, low, high - low, threshold))
            passed += count
        chunks.append((first, len(segments), places[chunk], places[chunk + 1]))
    tables = [np.array(rows, np.int64).reshape(-1, 4) for rows in (chunks, segments)]
    return Stream(len(chunks), *tables, exponents)


@functools.lru_cache(maxsize=32)
def _terms(begins: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
    """The terms of the jumps to chunks that begin there; none for the first."""
    found: list[np.ndarray] = []
    if len(begins) > 1:
        block = 2 * PER_BLOCK
        found.append(power(begins[1] * block - 1))
    if len(begins) > 2:
        step = power((begins[2] - begins[1]) * block)
        for _ in begins[2:]:
            found.append(times(found[-1], step))
    exponents, places = terms(found)
    return exponents, [0, *places]
