"""Streams of masks: distances in words → jump polynomials; sizes, thresholds, threads → tables of chunks.

Jump polynomials of the Mersenne Twister: a distance in words → ``x^distance`` modulo its characteristic polynomial.
Polynomials over GF(2) of degree below 19937 are uint8 arrays of their coefficients, lowest first. Products are made by
fast Fourier transform: a coefficient is a count below 2^15, computed to 1e-10, so rounding is exact. What is left of a
product after division by P is found with P's reciprocal (Barrett's reduction, exact for polynomials).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bridge.compile import DEGREE, PER_BLOCK

__all__ = ["Stream", "chunks_of", "power", "stream", "terms", "times"]


_LENGTH = 40960  # of a transform: more than the coefficients of a product, and a product of small primes
_WORDS, _SHIFT, _SEPARATION, _MATRIX = 624, 397, 31, 0x9908B0DF  # the twister's n, m, r, a

Bits = np.ndarray
"""uint8 [DEGREE], each 0 or 1."""


def power(distance: int) -> Bits:
    """``x^distance mod P``, by squaring."""
    result = np.zeros(DEGREE, np.uint8)
    result[0] = 1
    for digit in bin(distance)[2:]:
        square = np.zeros(2 * DEGREE, np.uint8)
        square[::2] = result
        result = _remainder(square)
        if digit == "1":
            overflow = result[-1]
            result = np.concatenate([[np.uint8(0)], result[:-1]]) ^ overflow * _characteristic()[:-1]
    return result


def times(a: Bits, b: Bits) -> Bits:
    """``a b mod P``."""
    return _remainder(_product(_transform(a), b)[: 2 * DEGREE])


def terms(polynomials: Sequence[Bits]) -> tuple[np.ndarray, list[int]]:
    """The exponents of the polynomials, one after the other, as uint16; where each begins, and the end."""
    exponents = [np.flatnonzero(polynomial).astype(np.uint16) for polynomial in polynomials]
    ends = np.cumsum([len(each) for each in exponents], dtype=np.int64)
    return np.concatenate([np.zeros(0, np.uint16), *exponents]), [0, *ends.tolist()]


@functools.cache
def _characteristic() -> Bits:
    """P, [DEGREE + 1], from the formula in appendix A of Matsumoto and Nishimura's paper."""

    def product(a: int, b: int) -> int:
        total = 0
        while b:
            low = b & -b
            total ^= a * low
            b ^= low
        return total

    high, low = 1 << _WORDS | 1 << _SHIFT, 1 << _WORDS - 1 | 1 << _SHIFT - 1
    powers = [1]
    for _ in range(_SEPARATION):
        powers.append(product(powers[-1], low))
    total = product(high, powers[_SEPARATION])
    for bit in range(_SEPARATION):
        if _MATRIX >> bit & 1:
            total ^= product(high, powers[_SEPARATION - 1 - bit])
    if _MATRIX >> _SEPARATION & 1:
        total ^= 1
    digits = np.frombuffer(total.to_bytes(DEGREE // 8 + 1, "little"), np.uint8)
    return np.unpackbits(digits, bitorder="little")[: DEGREE + 1]


@functools.cache
def _reciprocal() -> Bits:
    """The quotient of ``x^(2 DEGREE)`` by P, [DEGREE + 1]: the inverse of P read backwards, by Newton's iteration."""
    backwards, inverse = _characteristic()[::-1], np.ones(1, np.uint8)
    while len(inverse) <= DEGREE:
        square = np.zeros(2 * len(inverse), np.uint8)
        square[::2] = inverse
        length = min(len(square), DEGREE + 1)
        inverse = _product(_transform(backwards[:length]), square[:length])[:length]
    return inverse[::-1]


@functools.cache
def _transforms() -> tuple[np.ndarray, np.ndarray]:
    """Transforms of P and of its reciprocal."""
    return _transform(_characteristic()), _transform(_reciprocal())


def _transform(a: Bits) -> np.ndarray:
    return np.fft.rfft(a, _LENGTH)


def _product(a: np.ndarray, b: Bits) -> Bits:
    """The product of a polynomial, given by its transform, and another one; [_LENGTH]."""
    return (np.rint(np.fft.irfft(a * _transform(b), _LENGTH)).astype(np.int32) & 1).astype(np.uint8)


def _remainder(v: Bits) -> Bits:
    """``v mod P``; v is [2 DEGREE]."""
    divisor, reciprocal = _transforms()
    quotient = _product(reciprocal, v[DEGREE:])[DEGREE : 2 * DEGREE]
    return v[:DEGREE] ^ _product(divisor, quotient)[:DEGREE]


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
