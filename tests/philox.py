"""Philox 4x32-10 and the masks of a GPU's fused dropout, by numpy: the reference of generated kernels."""

from __future__ import annotations

import numpy as np

KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""(counter, key, numbers): known answers, from Random123, the library of the authors of the generator."""

SHAPES = (
    ((5, 7, 33), 1),
    ((5, 6, 33), 2),
    ((3, 8, 36), 4),
    ((3, 8, 32), 8),
    ((2, 3, 1000), 8),
    ((3, 9, 36), 0),
    ((3, 5, 33), 0),
)
"""(shape, elements that a thread of eager's kernel loads at once; 0: attention's) of masks."""


def philox4x32_10(counter, key) -> list[np.ndarray]:
    """Four numbers of counters, uint64 arrays of 32-bit words."""
    word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [np.asarray(each, dtype=np.uint64) for each in counter]
    k = [int(each) for each in key]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ np.uint64(k[0]), b & word, (a >> shift) ^ c[3] ^ np.uint64(k[1]), a & word]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def launched(count: int, most: int) -> int:
    """Threads of eager's launch on a GPU on which so many fit."""
    return min(most, -(-count // 256) * 256)


def advance(count: int, most: int) -> int:
    """Eager's increment of the generator's offset."""
    return ((count - 1) // (launched(count, most) * 4) + 1) * 4


def mask(count: int, rate: float, width: int, threads: int, seed: int, offset: int) -> np.ndarray:
    """The mask of so many elements, as the threads of eager's kernel draw it: in floating point, thread by thread; of a
    width of 0, attention's."""
    if width == 0:
        return mask_in_a_row(count, rate, seed, offset)
    kept = np.zeros(count, dtype=bool)
    thread = np.arange(threads, dtype=np.uint64)
    key, keep = (seed % 2**32, seed % 2**64 >> 32), np.float32(1 - rate)
    call = 0
    for turn in range(count):
        first = turn * threads * (4 if width == 1 else width)
        if first >= count:
            break
        for part in range(max(width // 4, 1)):
            before = offset // 4 + call
            numbers = philox4x32_10((before % 2**32, before >> 32, thread, 0), key)
            for which in range(4 if width == 1 else min(width, 4)):
                uniform = numbers[which].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
                at = (
                    thread * np.uint64(width) + np.uint64(4 * part + which)
                    if width > 1
                    else thread + np.uint64(which * threads)
                )
                at = at + np.uint64(first)
                inside = at < count
                kept[at[inside]] = (uniform < keep)[inside]
            call += 1
    return kept


def mask_in_a_row(count: int, rate: float, seed: int, offset: int) -> np.ndarray:
    """The mask of so many weights of attention, as its kernel draws it: numbers of one sequence."""
    call = np.arange(offset // 4, offset // 4 + count // 4 + 2, dtype=np.uint64)
    words = call & np.uint64(0xFFFFFFFF), call >> np.uint64(32), np.zeros_like(call), np.zeros_like(call)
    numbers = np.stack(philox4x32_10(words, (seed % 2**32, seed % 2**64 >> 32)), axis=-1).ravel()[offset % 4 :][:count]
    uniform = numbers.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return uniform > np.float32(rate)
