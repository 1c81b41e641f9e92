"""The Mersenne Twister as vector code: twist, temper, compare with a threshold.

The engine holds a *block* of 624 words. It is *twisted* into the next one; an output is a *tempered* word of the block.
The recurrence (Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8, 1998)

    word[i] = word[i + 397] ^ f(word[i], word[i + 1])        indices modulo 624

reaches back over 227 words at least, so sixteen of them at a time are independent.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, Ramp, Stmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import const, loop
from bridge.compile.cpu.limits import LANES

__all__ = ["BLOCK", "FIRST", "PER_BLOCK", "elements", "emit_loop", "load", "next_words", "twist", "working_buffer"]

BLOCK = 624
"""Words of a block."""

PER_BLOCK = BLOCK // 2
"""Elements of a mask that a block makes: each takes two outputs."""

FIRST = LANES
"""Where the block starts in the working buffer. The word before it is the last one of the block before, which is the
first half of an element if blocks and elements do not start together; behind it is room for a copy of its head."""

_SHIFT = 397  # how far ahead the recurrence looks
_REACH = BLOCK - _SHIFT  # words whose operand belongs to the old block
_HEAD = -(-_REACH // LANES) * LANES  # as many as whole vectors
_UPPER, _LOWER, _MATRIX = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_MANTISSA = (1 << 53) - 1
_PAIRS = LANES // 2  # elements of a vector

emit_loop = functools.partial(loop, scope=functools.partial(Emitter, 1))
"""A loop whose body emits by a scalar emitter."""


def working_buffer() -> tuple[Buffer, Stmt]:
    """Room for a block on the stack, and the statement that allocates it."""
    return stack_buffer(FIRST + BLOCK + _HEAD, "uint32", "words")


def load(e: Emitter, words: Buffer, at: Expr) -> Expr:
    return e.bind(BufferLoad(words, [e.index(at, 1)]))


def next_words(scalars: Emitter, words: Buffer, old: Expr, far: Expr, at: Expr) -> Expr:
    """Stores a vector of words at index ``at``: those one block after ``old``; ``far`` is ``_SHIFT`` words after it."""
    e = Emitter(LANES)
    zero, one = e.const(0, "uint32"), e.const(1, "uint32")
    low = load(e, words, old + const(1))
    mixed = (load(e, words, old) & e.const(_UPPER, "uint32")) | (low & e.const(_LOWER, "uint32"))
    # (0 - (low & 1)) & matrix would not do: to TVM, unsigned numbers never wrap
    matrix = e.select((low & one).equal(zero), zero, e.const(_MATRIX, "uint32"))
    word = e.bind(load(e, words, far) ^ (mixed >> one) ^ matrix)
    e.stmts.append(BufferStore(words, word, [e.index(at, 1)]))
    scalars.stmts += e.stmts
    return word


def twist(words: Buffer) -> list[Stmt]:
    """The next block, in place; the last word of the old one goes before it.

    In vectors from the left: what a vector reads of the old block is not overwritten yet, what it reads of the new one
    is there. The first part is written behind the block's end as well: for the vector in which the far end of the
    recurrence goes from the old block to the new one, and for the last word's neighbour.
    """
    crossing = _HEAD // LANES

    def old(e: Emitter, i: Var) -> None:
        at = e.name_index(i * const(LANES) + const(FIRST), "at")
        word = next_words(e, words, at, at + const(_SHIFT), at)
        e.stmts.append(BufferStore(words, word, [Ramp(at + const(BLOCK), 1, LANES)]))

    def new(e: Emitter, i: Var) -> None:
        at = e.name_index((i + const(crossing)) * const(LANES) + const(FIRST), "at")
        next_words(e, words, at, at - const(_REACH), at)

    last = BufferLoad(words, [const(FIRST + BLOCK - 1)])
    kept = BufferStore(words, last, [const(FIRST - 1)])
    return [kept, emit_loop(crossing, old), emit_loop(BLOCK // LANES - crossing, new)]


def _temper(e: Emitter, word: Expr) -> Expr:
    def number(value: int) -> Expr:
        return e.const(value, "uint32")

    word = e.bind(word ^ (word >> number(11)))
    word = e.bind(word ^ ((word << number(7)) & number(0x9D2C5680)))
    word = e.bind(word ^ ((word << number(15)) & number(0xEFC60000)))
    return e.bind(word ^ (word >> number(18)))


def _compare(words: Buffer, at: Expr, mask: Buffer, to: Expr, threshold: Expr, lanes: int) -> list[Stmt]:
    """``lanes`` elements of the mask from twice as many words."""
    e = Emitter(2 * lanes)
    outputs = _temper(e, load(e, words, at))
    pairs = Emitter(lanes)
    pairs.stmts = e.stmts
    half = pairs.const(32, "uint64")
    bits = pairs.bind(pairs.reinterpret(outputs, "uint64"))  # the first output is the low half: it has to be the high
    bits = ((bits << half) | (bits >> half)) & pairs.const(_MANTISSA, "uint64")
    drawn = pairs.cast(bits, "int64") < pairs.broadcast(threshold)
    pairs.stmts.append(BufferStore(mask, drawn, [pairs.index(to, 1)]))
    return pairs.stmts


def elements(words: Buffer, at: Expr, mask: Buffer, to: Expr, count: Expr, threshold: Expr) -> list[Stmt]:
    """``count`` elements: vectors, then one by one."""
    whole = tirx.truncdiv(count, const(_PAIRS))

    def vector(e: Emitter, i: Var) -> None:
        step = i * const(_PAIRS)
        e.stmts += _compare(words, at + step * const(2), mask, to + step, threshold, _PAIRS)

    def single(e: Emitter, i: Var) -> None:
        step = whole * const(_PAIRS) + i
        e.stmts += _compare(words, at + step * const(2), mask, to + step, threshold, 1)

    return [emit_loop(whole, vector), emit_loop(count - whole * const(_PAIRS), single)]
