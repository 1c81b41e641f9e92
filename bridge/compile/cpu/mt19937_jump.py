"""Jumping ahead in the Mersenne Twister: a block and a polynomial over GF(2) → a block far behind it.

The words of the twister are a linear recurrence of degree 19937 with characteristic polynomial P. If ``x^n mod P`` is
the sum of ``x^i`` over a set of ``i``, then word ``n + k`` is the exclusive or of the words ``i + k`` over that set,
for every ``k`` (Haramoto, Matsumoto, Nishimura, Panneton and L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random
Number Generators", INFORMS Journal on Computing 20, 2008). :mod:`bridge.rng.polynomials` makes the sets.

Word 0 is not part of it: the recurrence reads its highest bit only, and a seed leaves any others there. So words are
counted from 1.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Bind, Buffer, BufferLoad, BufferStore, Expr, Stmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import INDEX, const
from bridge.compile.cpu.limits import LANES
from bridge.compile.cpu.mt19937 import BLOCK, FIRST, emit_loop, load, next_words

__all__ = ["DEGREE", "jump"]

DEGREE = 19937
"""Of the characteristic polynomial."""

_SHIFT = 397
_STRIP = 3  # vectors of the result that are summed at a time, in registers
_WORDS = -(-(DEGREE + BLOCK) // BLOCK) * BLOCK  # what the windows of all terms lie in


def jump(start: Buffer, words: Buffer, terms: Buffer, begin: Expr, end: Expr) -> list[Stmt]:
    """Sets the block of ``words`` from that of ``start``.

    Args:
        start: a block, [624].
        words: a working buffer.
        terms: uint16; ``terms[begin:end]`` is the set of ``i`` for a distance of ``n`` words: the new block starts
            ``n + 1`` words after ``start``.
    """
    stream, room = stack_buffer(_WORDS, "uint32", "stream")

    def copy(e: Emitter, i: Var) -> None:
        e.stmts.append(BufferStore(stream, BufferLoad(start, [i]), [i]))

    def extend(e: Emitter, i: Var) -> None:
        at = e.name_index(i * const(LANES), "at")
        next_words(e, stream, at, at + const(_SHIFT), at + const(BLOCK))

    def strip(e: Emitter, i: Var) -> None:
        first = e.name_index(i * const(_STRIP * LANES), "first")
        sums = [stack_buffer(1, f"uint32x{LANES}", f"sum{part}") for part in range(_STRIP)]
        zero = Emitter(LANES).const(0, "uint32")
        for cell, allocation in sums:
            e.stmts += [allocation, BufferStore(cell, zero, [const(0)])]

        def add(inside: Emitter, term: Var) -> None:
            index = Var("index", INDEX)
            window = tirx.Cast(INDEX, BufferLoad(terms, [begin + term])) + first + const(1)
            inside.stmts.append(Bind(index, window))
            vectors = Emitter(LANES)
            for part, (cell, _) in enumerate(sums):
                total = BufferLoad(cell, [const(0)]) ^ load(vectors, stream, index + const(part * LANES))
                vectors.stmts.append(BufferStore(cell, total, [const(0)]))
            inside.stmts += vectors.stmts

        e.stmts.append(emit_loop(end - begin, add))
        for part, (cell, _) in enumerate(sums):
            at = Emitter(LANES).index(first + const(FIRST + part * LANES), 1)
            e.stmts.append(BufferStore(words, BufferLoad(cell, [const(0)]), [at]))

    return [
        room,
        emit_loop(BLOCK, copy),
        emit_loop((_WORDS - BLOCK) // LANES, extend),
        emit_loop(BLOCK // (_STRIP * LANES), strip),
    ]
