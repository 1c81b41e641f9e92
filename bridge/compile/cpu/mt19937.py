"""The Mersenne Twister as vector code: Bernoulli masks from a generator's state, as PyTorch's CPU generator draws them.

A generator's state is what ``torch.Generator.get_state`` gives: 632 words of 64 bits, of which this code knows

    word 1       low half: ``left``, one more than the outputs that the current block still has
    word 2       ``next``, the index of the next output in the block
    words 3-626  the block, 32 bits in each word

and carries the others (the seed, the normal numbers kept for later) over as they are. A block is *twisted* into the
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
    For,
    ForKind,
    IfThenElse,
    PrimFunc,
    Ramp,
    Return,
    Stmt,
    Var,
)

from bridge.compile.codegen.emit import LANES, Emitter, stack_buffer
from bridge.compile.cpu.row import sequence
from bridge.compile.runtime.build import LOOPS_ATTR

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


def _const(number: int) -> Expr:
    return tirx.const(number, "int64")


def _loop(extent: Expr | int, body) -> Stmt:
    """``body(i, emitter)`` says what one turn emits."""
    i, e = Var("i", "int64"), Emitter(1)
    body(i, e)
    extent = _const(extent) if isinstance(extent, int) else extent
    return For(i, _const(0), extent, ForKind.SERIAL, sequence(e.stmts))


def _pointer(name: str, dtype: str) -> Var:
    return Var(name, PointerType(PrimType(dtype)))


def _load(e: Emitter, words: Buffer, at: Expr) -> Expr:
    return e.bind(BufferLoad(words, [e.index(at, 1)]))


def _next_words(scalars: Emitter, words: Buffer, at: Expr, operand: Expr) -> Expr:
    """Replaces a vector of words at index ``at``; ``operand`` is where those of the recurrence's far end are."""
    e = Emitter(LANES)
    zero, one = e.const(0, "uint32"), e.const(1, "uint32")
    low = _load(e, words, at + _const(1))
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

    def old(i: Var, e: Emitter) -> None:
        at = e.name_index(i * _const(LANES) + _const(_FIRST), "at")
        word = _next_words(e, words, at, at + _const(_SHIFT))
        e.stmts.append(BufferStore(words, word, [Ramp(at + _const(_SIZE), 1, LANES)]))

    def new(i: Var, e: Emitter) -> None:
        at = e.name_index((i + _const(crossing)) * _const(LANES) + _const(_FIRST), "at")
        _next_words(e, words, at, at - _const(_REACH))

    return [_loop(crossing, old), _loop(_SIZE // LANES - crossing, new)]


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
    kept = pairs.cast(bits, "int64") < pairs.broadcast(threshold)
    pairs.stmts.append(BufferStore(mask, kept, [pairs.index(to, 1)]))
    return pairs.stmts


def _elements(words: Buffer, at: Expr, mask: Buffer, to: Expr, count: Expr, threshold: Expr) -> list[Stmt]:
    """``count`` elements: vectors, then one by one."""
    whole = tirx.truncdiv(count, _const(_PAIRS))

    def vector(i: Var, e: Emitter) -> None:
        step = i * _const(_PAIRS)
        e.stmts += _compare(words, at + step * _const(2), mask, to + step, threshold, _PAIRS)

    def single(i: Var, e: Emitter) -> None:
        step = whole * _const(_PAIRS) + i
        e.stmts += _compare(words, at + step * _const(2), mask, to + step, threshold, 1)

    return [_loop(whole, vector), _loop(count - whole * _const(_PAIRS), single)]


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

    def read(i: Var, e: Emitter) -> None:
        word = tirx.Cast("uint32", BufferLoad(state, [i + _const(_BLOCK)]))
        e.stmts.append(BufferStore(words, word, [i + _const(_FIRST)]))

    def write(i: Var, e: Emitter) -> None:
        word = tirx.Cast("int64", BufferLoad(words, [i + _const(_FIRST)]))
        e.stmts.append(BufferStore(state, word, [i + _const(_BLOCK)]))

    seeded = head.bind(BufferLoad(state, [_const(_LEFT)]) & _const(~0xFFFFFFFF))
    left = head.bind(BufferLoad(state, [_const(_LEFT)]) & _const(0xFFFFFFFF))
    begin = head.bind(BufferLoad(state, [_const(_NEXT)]))
    odd = head.bind(tirx.truncmod(left - _const(1), _const(2)))
    early = head.bind(tirx.min(tirx.truncdiv(left - _const(1), _const(2)), count))  # elements of the block at hand
    blocks = head.bind(tirx.truncdiv(count - early + _const(_PER_BLOCK - 1), _const(_PER_BLOCK)))

    def block(i: Var, e: Emitter) -> None:
        """What the block at hand still has (turn 0), what the i-th block after it has."""
        fresh = i > _const(0)
        last = BufferLoad(words, [_const(_FIRST + _SIZE - 1)])
        twist = [BufferStore(words, last, [_const(_FIRST - 1)]), *_twist(words)]
        e.stmts.append(IfThenElse(fresh, sequence(twist), None))
        done = e.bind(tirx.Select(fresh, early + (i - _const(1)) * _const(_PER_BLOCK), _const(0)))
        now = e.bind(tirx.Select(fresh, tirx.min(count - done, _const(_PER_BLOCK)), early))
        at = e.bind(tirx.Select(fresh, _const(0) - odd, begin))
        e.stmts += _elements(words, at + _const(_FIRST), mask, done, now, threshold)
        e.stmts.append(BufferStore(used, at + now * _const(2), [_const(0)]))

    new_next = BufferLoad(used, [_const(0)])
    new_left = tirx.Select(blocks > _const(0), _const(_SIZE + 1) - new_next, left - early * _const(2))
    valid = tirx.all(left >= _const(1), begin >= _const(0), begin + left - _const(1) <= _const(_SIZE))
    body = [
        DeclBuffer(state, data=state_pointer),
        DeclBuffer(mask, data=mask_pointer),
        room,
        used_room,
        *head.stmts,
        IfThenElse(tirx.Not(valid), Return(_const(0)), None),
        _loop(_SIZE, read),
        _loop(blocks + _const(1), block),
        _loop(_SIZE, write),
        BufferStore(state, seeded | new_left, [_const(_LEFT)]),
        BufferStore(state, new_next, [_const(_NEXT)]),
        Return(_const(1)),
    ]
    return _function([state_pointer, mask_pointer, count, threshold], body)


def _function(params: list[Var], body: list[Stmt]) -> PrimFunc:
    return PrimFunc(params, sequence(body)).with_attr(
        {"tirx.noalias": True, "tirx.is_scheduled": True, LOOPS_ATTR: True}
    )
