"""Jump polynomials of the Mersenne Twister: a distance in words → ``x^distance`` modulo its characteristic polynomial.

Polynomials over GF(2) of degree below 19937 are uint8 arrays of their coefficients, lowest first. Products are made by
fast Fourier transform: a coefficient is a count below 2^15, computed to 1e-10, so rounding is exact. What is left of a
product after division by P is found with P's reciprocal (Barrett's reduction, exact for polynomials).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from bridge.compile import DEGREE

__all__ = ["power", "terms", "times"]

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
