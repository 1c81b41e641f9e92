"""Compiled Bernoulli draws: masks and a CPU generator → PyTorch's bits, and PyTorch's state afterwards.

PyTorch draws Bernoulli masks one element after another. Here a vectorized Mersenne Twister
(:mod:`bridge.compile.cpu.mt19937`) takes the generator's own lock, as PyTorch's draws do, fills the masks and advances
the generator's engine in place; large masks on all threads. Other threads' draws come before or after.

Both the generator's memory (:mod:`bridge.rng.engine`) and the rule are undocumented, and other builds differ (on
Intel's processors a generator of MKL). So :func:`compiled` compares the code with PyTorch before its use; where they
differ, PyTorch draws.

Streams of masks: sizes, thresholds, threads → tables of chunks, with a jump polynomial for the distance to each.

Jump polynomials of the Mersenne Twister: a distance in words → ``x^distance`` modulo its characteristic polynomial.
Polynomials over GF(2) of degree below 19937 are uint8 arrays of their coefficients, lowest first. Products are made by
fast Fourier transform: a coefficient is a count below 2^15, computed to 1e-10, so rounding is exact. The remainder of a
product modulo P is found with P's reciprocal (Barrett's reduction, exact for polynomials).
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from autodiff.lazy import cached_property
from bridge.base.devices import HOST
from bridge.base.log import channel
from bridge.base.torch_internals import VF
from bridge.compile import DEGREE, PER_BLOCK, Built, bernoulli_function, host_backend
from bridge.rng.engine import LOCK, EngineOffsets, functions, layout_for

__all__ = ["Kernels", "Mask", "MaskRun", "Stream", "chunks_of", "compiled", "draw_by_torch", "power", "stream", "terms"]
__all__ += ["times"]

_LENGTH = 40960  # length of a transform: exceeds a product's coefficients; a product of small primes
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
    """The concatenated exponents of the polynomials, as uint16; the beginning of each, and the end."""
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
"""The time of a jump to a chunk, in blocks of a mask: 0.15 ms on Zen 5."""

_LEAST = 1000
"""The fewest blocks that a thread jumps for."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Tables (int64, uint16 for the terms) of chunked draws; see :func:`bridge.compile.bernoulli_function`."""

    count: int
    chunks: np.ndarray = field(repr=False)
    segments: np.ndarray = field(repr=False)
    terms: np.ndarray = field(repr=False)

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Addresses of the tables, and the number of chunks: the last arguments of a compiled draw."""
        return self.chunks.ctypes.data, self.segments.ctypes.data, self.terms.ctypes.data, self.count


def chunks_of(elements: int, threads: int) -> list[int]:
    """The first blocks of chunks, one per thread. The first chunk, without a jump, is longer; the last may be shorter.

    There are eight sizes between two powers of two, so that masks of many sizes share the jumps, each of which takes
    some 20 ms to find.
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
    """The tables for drawing masks of ``(elements, threshold)`` one after the other on ``threads`` threads."""
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
    """The terms of the jumps to chunks with these first blocks; none for the first."""
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


log = channel("mt19937")


@dataclass(frozen=True)
class Mask:
    """A mask to draw: one byte per element, true with ``probability``, a float64 in [0, 1].

    Elements are drawn in memory order; ``dtype`` is that of eager's tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    probability: float
    dtype: torch.dtype = torch.bool

    def __post_init__(self):
        if not 0 <= self.probability <= 1:
            raise ValueError(f"a mask's probability must be in [0, 1], got {self.probability}")

    @cached_property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def threshold(self) -> int:
        """The bound of the 53-bit integers that give true: ``k * 2**-53 < p`` without rounding."""
        return math.ceil(math.ldexp(self.probability, 53))

    @cached_property
    def dense(self) -> bool:
        """Whether the elements fill their memory, in any order of dimensions."""
        below = 1
        for stride, extent in sorted(zip(self.stride, self.shape, strict=True)):
            if extent != 1:
                if stride != below:
                    return self.count == 0
                below *= extent
        return True

    def empty(self) -> torch.Tensor:
        """A bool tensor to draw into."""
        return VF.empty_strided(self.shape, self.stride, dtype=torch.bool, device=HOST)


@dataclass(frozen=True)
class Kernels:
    """The compiled functions of :mod:`bridge.compile.cpu.mt19937`, and the offsets of lock and engine."""

    serial: Built = field(repr=False)
    layout: EngineOffsets

    @cached_property
    def parallel(self) -> Built:
        """The function for a stream of several chunks; compiled at first use."""
        (built,) = host_backend().build([("bridge_bernoulli_parallel", bernoulli_function(True))])
        return built

    def fill(self, generator: torch.Generator, tensors: Sequence[torch.Tensor], tables: Stream) -> bool:
        """Fills the tensors in order and advances the generator; ``False`` if its engine is in no valid state."""
        lock, engine = self.layout.addresses(generator)
        masks = array("q", [tensor.data_ptr() for tensor in tensors])
        built = self.serial if tables.count == 1 else self.parallel
        with LOCK:
            return bool(built.function(lock, engine, masks.buffer_info()[0], *tables.addresses))


class MaskRun:
    """Dense masks that are drawn one after the other, by the result of :func:`compiled`."""

    def __init__(self, kernels: Kernels, masks: Sequence[Mask]):
        self._kernels, self._masks = kernels, tuple(masks)
        self._streams: dict[int, Stream] = {}

    def draw(self, generator: torch.Generator | None = None) -> list[torch.Tensor]:
        """Draws the masks, and leaves the generator where PyTorch would have left it.

        Args:
            generator: a CPU generator; PyTorch's default one if ``None``.

        Returns:
            bool tensors with the masks' shapes and strides, each in memory of its own.
        """
        generator = torch.default_generator if generator is None else generator
        tensors = [mask.empty() for mask in self._masks]
        if self._kernels.fill(generator, tensors, self._stream(host_backend().threads())):
            return tensors
        return [draw_by_torch(mask, generator) for mask in self._masks]

    def _stream(self, threads: int) -> Stream:
        found = self._streams.get(threads)
        if found is None:
            found = self._streams[threads] = self._checked(threads)
        return found

    def _checked(self, threads: int) -> Stream:
        """The stream for these threads if it gives the same bits and state as on one thread; else the serial one."""
        sizes = [(mask.count, mask.threshold) for mask in self._masks]
        tables, serial = stream(sizes, threads), stream(sizes, 1)
        if tables.count == 1:
            return serial
        generators = [torch.Generator().manual_seed(_SEED) for _ in range(2)]
        made = [[mask.empty() for mask in self._masks] for _ in range(2)]
        filled = map(self._kernels.fill, generators, made, (tables, serial))
        if all(filled) and all(map(VF.equal, *made)) and _equal_states(*generators):
            return tables
        log.warning("masks drawn on %d threads are not those drawn on one; one draws them", tables.count)
        return serial


def draw_by_torch(mask: Mask, generator: torch.Generator | None = None) -> torch.Tensor:
    """The mask drawn by PyTorch, in eager's dtype where that decides the bits; bool."""
    if _same_bits(mask.dtype):
        return mask.empty().bernoulli_(mask.probability, generator=generator)
    drawn = VF.empty_strided(mask.shape, mask.stride, dtype=mask.dtype, device=HOST)
    return drawn.bernoulli_(mask.probability, generator=generator).to(torch.bool)


@functools.cache
def _same_bits(dtype: torch.dtype) -> bool:
    """Whether PyTorch's Bernoulli numbers in this dtype equal its numbers in bytes."""
    generators = [torch.Generator().manual_seed(_SEED) for _ in range(2)]
    pairs = zip((torch.bool, dtype), generators, strict=True)
    ours, theirs = (VF.empty(1000, dtype=kind).bernoulli_(0.7, generator=g).to(torch.bool) for kind, g in pairs)
    return VF.equal(ours, theirs) and _equal_states(*generators)


def compiled() -> Kernels | None:
    """The compiled draws; ``None`` where this build of PyTorch draws differently or hides its lock (logged once).

    Compiled at first use, and compared with PyTorch (lock, bits and states) on new generators.
    """
    serial, hold = functions()
    layout = layout_for(hold)
    return None if layout is None else _checked(serial, layout)


@functools.lru_cache(maxsize=1)
def _checked(serial: Built, layout: EngineOffsets) -> Kernels | None:
    kernels = Kernels(serial, layout)
    if _draws_as_torch(kernels):
        return kernels
    log.info(
        "PyTorch %s draws Bernoulli masks by a rule of its own here; dropout masks are left to it.", torch.__version__
    )
    return None


_SEED = 20
_CHECKS = ((1, 0.9), (311, 0.5), (2, 0.1), (1000, 0.9), (0, 0.5), (313, 1.0), (624, 0.0), (5, 1 / 3))
"""(elements, probability): the consecutive draws of a check, which begin at different positions of the block."""


def _draws_as_torch(kernels: Kernels) -> bool:
    """Whether bits and states are PyTorch's, from a fresh seed and after an odd number of outputs.

    A normal number that torch has cached is part of the state.
    """
    for used in (0, 1, 622):
        ours, theirs = (torch.Generator().manual_seed(_SEED + used) for _ in range(2))
        for generator in (ours, theirs):
            VF.rand(used, generator=generator)  # one output per element
            VF.randn(used, generator=generator)
            VF.randn(used % 2, dtype=torch.float64, generator=generator)
        if not _equal_states(ours, theirs):
            return False
        for count, probability in _CHECKS:
            mask = Mask((count,), (1,), probability)
            expected = VF.empty(count, dtype=torch.bool).bernoulli_(probability, generator=theirs)
            made = mask.empty()
            if not kernels.fill(ours, [made], stream([(mask.count, mask.threshold)], 1)):
                return False
            if not VF.equal(made, expected) or not _equal_states(ours, theirs):
                return False
    return True


def _equal_states(ours: torch.Generator, theirs: torch.Generator) -> bool:
    return VF.equal(ours.get_state(), theirs.get_state())
