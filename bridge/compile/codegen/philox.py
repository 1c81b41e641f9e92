"""Philox 4x32-10 and the masks of a GPU's fused dropouts: an element's number → whether eager's dropout keeps it.

Philox (Salmon et al., 2011) is a function: a key and a counter give four 32-bit numbers, so each consumer can recompute
a mask. torch's kernel numbers its threads; thread t uses the counters with t as their upper half, four numbers per
call, and the generator's offset gives the number of earlier calls. The launch size and the number of elements that a
thread loads at once determine thread, call and number of each element (:func:`place`).

Attention's kernel (the memory-efficient one) takes its numbers from one sequence instead, in the order of its weights.

64-bit products are one instruction in CUDA. No value here is a float: eager compares
``float(u) * 2**-32 + 2**-33 < float(1 - rate)``, attention ``... > float(rate)``; the left side is monotone in ``u``,
so an integer comparison is equivalent.
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.tirx import Expr

from bridge.compile.codegen.emit import Emitter, element_type

__all__ = ["IN_A_ROW", "NUMBERS", "WIDTHS", "is_kept", "kept", "numbers_of", "philox4x32_10", "place", "threshold"]

IN_A_ROW = 0
"""The width of attention's masks: one sequence for all elements."""
WIDTHS = (IN_A_ROW, 1, 2, 4, 8)
"""The numbers of elements that a thread of torch's kernel may load at once."""

NUMBERS = 4
"""Numbers per call."""

_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = "uint32"
_WIDE = "uint64"


def threshold(rate: float, width: int = 1) -> int:
    """The least 32-bit number that makes eager drop an element at this rate, or makes attention keep it."""
    low, high = 0, 2**32 - 1  # the largest number gives 1.0: dropped at every rate, and kept by attention
    while low < high:
        middle = (low + high) // 2
        uniform = np.float32(middle) * np.float32(2**-32) + np.float32(2**-33)
        is_below = uniform <= np.float32(rate) if width == IN_A_ROW else uniform < np.float32(1 - rate)
        low, high = (middle + 1, high) if is_below else (low, middle)
    return low


def philox4x32_10(e: Emitter, key: tuple[Expr, Expr], counter: tuple[Expr, Expr, Expr, Expr]) -> tuple[Expr, ...]:
    """The four numbers of a counter; words are uint32, least significant first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(_ROUNDS):
        if turn:
            k0, k1 = (e.bind(tirx.Add(k, e.const(step, _WORD))) for k, step in zip((k0, k1), _KEY_STEPS, strict=True))
        first, second = (
            e.bind(e.wide_product(c, e.const(factor, _WORD)), "product")
            for c, factor in zip((c0, c2), _FACTORS, strict=True)
        )
        c0, c2 = (
            e.bind(tirx.bitwise_xor(tirx.bitwise_xor(_high(e, product), c), k), "word")
            for product, c, k in ((second, c1, k0), (first, c3, k1))
        )
        c1, c3 = e.bind(_low(e, second), "word"), e.bind(_low(e, first), "word")
    return c0, c1, c2, c3


def numbers_of(e: Emitter, seed: Expr, offset: Expr, call: Expr, thread: Expr) -> tuple[Expr, ...]:
    """The four numbers of a thread's call after the generator's offset.

    Args:
        seed, offset: of the generator, before the draw; uint64.
        call, thread: uint32.
    """
    seed = e.bind(e.cast(seed, _WIDE), "seed")
    before = tirx.shift_right(e.cast(offset, _WIDE), e.const(2, _WIDE))  # calls: four numbers each
    counter = e.bind(tirx.Add(before, e.cast(call, _WIDE)), "counter")
    return philox4x32_10(e, (_low(e, seed), _high(e, seed)), (_low(e, counter), _high(e, counter), thread, _zero(e)))


def place(e: Emitter, width: int, index: Expr, threads: Expr) -> tuple[Expr, Expr, Expr]:
    """The call, the thread and the index among four numbers that decide about an element, as uint32.

    Args:
        width: elements that a thread of eager's kernel loads at once, of :data:`WIDTHS`.
        index: of the element in the order of eager's kernel.
        threads: of eager's launch.
    """
    kind = _WIDE if element_type(index) == "int64" else _WORD
    if width == IN_A_ROW:
        index = e.bind(e.cast(index, kind), "index")
        call = e.bind(e.cast(tirx.shift_right(index, e.const(2, kind)), _WORD), "call")
        return call, _zero(e), e.bind(e.cast(tirx.bitwise_and(index, e.const(3, kind)), _WORD), "component")
    index, threads = e.bind(e.cast(index, kind), "index"), e.cast(threads, kind)
    # elements of one call of all threads: `width` per thread, or, at width 1, one for each number of a call
    round_of = e.bind(tirx.Mul(threads, e.const(NUMBERS if width == 1 else width, kind)), "round")
    turn = e.bind(tirx.truncdiv(index, round_of), "turn")
    rest = e.bind(tirx.Sub(index, tirx.Mul(turn, round_of)), "rest")
    call = e.cast(turn, _WORD)
    if width == 1:
        component = e.bind(tirx.truncdiv(rest, threads), "component")
        thread = tirx.Sub(rest, tirx.Mul(component, threads))
        return call, e.bind(e.cast(thread, _WORD), "thread"), e.cast(component, _WORD)
    thread = e.cast(tirx.shift_right(rest, e.const(width.bit_length() - 1, kind)), _WORD)
    within = e.bind(e.cast(tirx.bitwise_and(rest, e.const(width - 1, kind)), _WORD), "within")
    if width == 8:
        call = tirx.Add(tirx.Mul(call, e.const(2, _WORD)), tirx.shift_right(within, e.const(2, _WORD)))
    return call, e.bind(thread, "thread"), e.bind(tirx.bitwise_and(within, e.const(3, _WORD)), "component")


def kept(e: Emitter, width: int, index: Expr, seed: Expr, offset: Expr, threads: Expr, least: Expr) -> Expr:
    """Whether eager's dropout keeps an element; ``least``: see :func:`threshold`, other arguments: :func:`place`."""
    call, thread, component = place(e, width, index, threads)
    numbers = numbers_of(e, seed, offset, call, thread)
    word = numbers[3]
    for which in (2, 1, 0):
        word = e.select(tirx.EQ(component, e.const(which, _WORD)), numbers[which], word)
    return is_kept(width, e.bind(word, "word"), e.cast(least, _WORD))


def is_kept(width: int, number: Expr, least: Expr) -> Expr:
    """Whether eager keeps an element with this random number; ``least``: see :func:`threshold`."""
    return tirx.GE(number, least) if width == IN_A_ROW else tirx.LT(number, least)


def _zero(e: Emitter) -> Expr:
    return e.const(0, _WORD)


def _low(e: Emitter, wide: Expr) -> Expr:
    return e.cast(wide, _WORD)


def _high(e: Emitter, wide: Expr) -> Expr:
    return e.cast(tirx.shift_right(wide, e.const(32, _WIDE)), _WORD)
