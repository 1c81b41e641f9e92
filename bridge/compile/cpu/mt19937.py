"""The Mersenne Twister as vector code: a CPU generator's state → Bernoulli masks as PyTorch draws them.

A generator's state is what ``torch.Generator.get_state`` gives: 632 words of 64 bits, of which this code knows

    word 1       low half: ``left``, one more than the outputs that the current block still has
    word 2       ``next``, the index of the next output in the block
    words 3-626  the block, 32 bits in each word

and carries the others (the seed, normal numbers drawn ahead) over as they are. A block is *twisted* into the
next one; an output is a *tempered* word of the block. The recurrence (Matsumoto and Nishimura, "Mersenne Twister",
ACM TOMACS 8, 1998)

    word[i] = word[i + 397] ^ f(word[i], word[i + 1])        indices modulo 624

reaches back over 227 words at least, so sixteen of them at a time are independent.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import (
    Buffer,
    BufferLoad,
    BufferStore,
    DeclBuffer,
    Expr,
    IfThenElse,
    PrimFunc,
    Ramp,
    Return,
    Stmt,
    Var,
)

from bridge.compile.codegen.emit import LANES, Emitter, stack_buffer
from bridge.compile.codegen.tir import const, loop, loop_function, sequence

__all__ = ["STATE_WORDS", "bernoulli_function"]

STATE_WORDS = 632
"""64-bit words of a generator's state."""

_LEFT, _NEXT, _BLOCK = 1, 2, 3  # where they are in the state
_SIZE, _SHIFT = 624, 397  # words of a block, and how far ahead the recurrence looks
_REACH = _SIZE - _SHIFT  # words whose operand belongs to the old block
_HEAD = -(-_REACH // LANES) * LANES  # as many as whole vectors
_UPPER, _LOWER, _MATRIX = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_MANTISSA = (1 << 53) - 1
_PAIRS = LANES // 2  # elements of a vector: each takes two outputs
_PER_BLOCK = _SIZE // 2

_FIRST = LANES
"""Where the block starts in the working buffer. The word before it is the last one of the block before, which is the
first half of an element if blocks and elements do not start together; behind it is room for a copy of its head."""

_emit_loop = functools.partial(loop, scope=functools.partial(Emitter, 1))
"""A loop whose body emits by a scalar emitter."""


def _pointer(name: str, dtype: str) -> Var:
    return Var(name, PointerType(PrimType(dtype)))


def _load(e: Emitter, words: Buffer, at: Expr) -> Expr:
    return e.bind(BufferLoad(words, [e.index(at, 1)]))


def _next_words(scalars: Emitter, words: Buffer, at: Expr, operand: Expr) -> Expr:
    """Replaces a vector of words at index ``at``; ``operand`` is where those of the recurrence's far end are."""
    e = Emitter(LANES)
    zero, one = e.const(0, "uint32"), e.const(1, "uint32")
    low = _load(e, words, at + const(1))
    mixed = (_load(e, words, at) & e.const(_UPPER, "uint32")) | (low & e.const(_LOWER, "uint32"))
    # (0 - (low & 1)) & matrix would not do: to TVM, unsigned numbers never wrap
    matrix = e.select((low & one).equal(zero), zero, e.const(_MATRIX, "uint32"))
    word = e.bind(_load(e, words, operand) ^ (mixed >> one) ^ matrix)
    e.stmts.append(BufferStore(words, word, [e.index(at, 1)]))
    scalars.stmts += e.stmts
    return word


def _twist(words: Buffer) -> list[Stmt]:
    """The next block, in place.

    In vectors from the left: what a vector reads of the old block is not overwritten yet, what it reads of the new one
    is there. The first part is written behind the block's end as well: for the vector in which the far end of the
    recurrence goes from the old block to the new one, and for the last word's neighbour.
    """
    crossing = _HEAD // LANES

    def old(e: Emitter, i: Var) -> None:
        at = e.name_index(i * const(LANES) + const(_FIRST), "at")
        word = _next_words(e, words, at, at + const(_SHIFT))
        e.stmts.append(BufferStore(words, word, [Ramp(at + const(_SIZE), 1, LANES)]))

    def new(e: Emitter, i: Var) -> None:
        at = e.name_index((i + const(crossing)) * const(LANES) + const(_FIRST), "at")
        _next_words(e, words, at, at - const(_REACH))

    return [_emit_loop(crossing, old), _emit_loop(_SIZE // LANES - crossing, new)]


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
    outputs = _temper(e, _load(e, words, at))
    pairs = Emitter(lanes)
    pairs.stmts = e.stmts
    half = pairs.const(32, "uint64")
    bits = pairs.bind(pairs.reinterpret(outputs, "uint64"))  # the first output is the low half: it has to be the high
    bits = ((bits << half) | (bits >> half)) & pairs.const(_MANTISSA, "uint64")
    drawn = pairs.cast(bits, "int64") < pairs.broadcast(threshold)
    pairs.stmts.append(BufferStore(mask, drawn, [pairs.index(to, 1)]))
    return pairs.stmts


def _elements(words: Buffer, at: Expr, mask: Buffer, to: Expr, count: Expr, threshold: Expr) -> list[Stmt]:
    """``count`` elements: vectors, then one by one."""
    whole = tirx.truncdiv(count, const(_PAIRS))

    def vector(e: Emitter, i: Var) -> None:
        step = i * const(_PAIRS)
        e.stmts += _compare(words, at + step * const(2), mask, to + step, threshold, _PAIRS)

    def single(e: Emitter, i: Var) -> None:
        step = whole * const(_PAIRS) + i
        e.stmts += _compare(words, at + step * const(2), mask, to + step, threshold, 1)

    return [_emit_loop(whole, vector), _emit_loop(count - whole * const(_PAIRS), single)]


@functools.cache
def bernoulli_function() -> PrimFunc:
    """``(state, mask, count, threshold)``: fills ``mask`` and advances ``state``.

    Element ``i`` takes the outputs ``2 i`` and ``2 i + 1``, the high and the low half of a 64-bit number; it is true
    where that number's low 53 bits are less than ``threshold``.

    Arguments: a pointer to a state, a pointer to ``count`` bytes, two integers of 64 bits. Returns 1; or 0 and does
    nothing if the state says that outputs are left beyond the end of the block.
    """
    state_pointer, mask_pointer = _pointer("state_pointer", "int64"), _pointer("mask_pointer", "bool")
    count, threshold = Var("count", "int64"), Var("threshold", "int64")
    state = tirx.decl_buffer((STATE_WORDS,), "int64", "state", data=state_pointer)
    mask = tirx.decl_buffer((count,), "bool", "mask", data=mask_pointer, data_alignment=1)
    words, room = stack_buffer(_FIRST + _SIZE + _HEAD, "uint32", "words")
    used, used_room = stack_buffer(1, "int64", "used")
    head = Emitter(1)

    def read(e: Emitter, i: Var) -> None:
        word = tirx.Cast("uint32", BufferLoad(state, [i + const(_BLOCK)]))
        e.stmts.append(BufferStore(words, word, [i + const(_FIRST)]))

    def write(e: Emitter, i: Var) -> None:
        word = tirx.Cast("int64", BufferLoad(words, [i + const(_FIRST)]))
        e.stmts.append(BufferStore(state, word, [i + const(_BLOCK)]))

    seeded = head.bind(BufferLoad(state, [const(_LEFT)]) & const(~0xFFFFFFFF))
    left = head.bind(BufferLoad(state, [const(_LEFT)]) & const(0xFFFFFFFF))
    begin = head.bind(BufferLoad(state, [const(_NEXT)]))
    odd = head.bind(tirx.truncmod(left - const(1), const(2)))
    early = head.bind(tirx.min(tirx.truncdiv(left - const(1), const(2)), count))  # elements of the block at hand
    blocks = head.bind(tirx.truncdiv(count - early + const(_PER_BLOCK - 1), const(_PER_BLOCK)))

    def block(e: Emitter, i: Var) -> None:
        """What the block at hand still has (turn 0), what the i-th block after it has."""
        fresh = i > const(0)
        last = BufferLoad(words, [const(_FIRST + _SIZE - 1)])
        twist = [BufferStore(words, last, [const(_FIRST - 1)]), *_twist(words)]
        e.stmts.append(IfThenElse(fresh, sequence(twist), None))
        done = e.bind(tirx.Select(fresh, early + (i - const(1)) * const(_PER_BLOCK), const(0)))
        now = e.bind(tirx.Select(fresh, tirx.min(count - done, const(_PER_BLOCK)), early))
        at = e.bind(tirx.Select(fresh, const(0) - odd, begin))
        e.stmts += _elements(words, at + const(_FIRST), mask, done, now, threshold)
        e.stmts.append(BufferStore(used, at + now * const(2), [const(0)]))

    new_next = BufferLoad(used, [const(0)])
    new_left = tirx.Select(blocks > const(0), const(_SIZE + 1) - new_next, left - early * const(2))
    valid = tirx.all(left >= const(1), begin >= const(0), begin + left - const(1) <= const(_SIZE))
    body = [
        DeclBuffer(state, data=state_pointer),
        DeclBuffer(mask, data=mask_pointer),
        room,
        used_room,
        *head.stmts,
        IfThenElse(tirx.Not(valid), Return(const(0)), None),
        _emit_loop(_SIZE, read),
        _emit_loop(blocks + const(1), block),
        _emit_loop(_SIZE, write),
        BufferStore(state, seeded | new_left, [const(_LEFT)]),
        BufferStore(state, new_next, [const(_NEXT)]),
        Return(const(1)),
    ]
    return loop_function([state_pointer, mask_pointer, count, threshold], sequence(body))
