"""Bernoulli masks from a generator of torch's, in place: lock, draw, unlock in one call without Python in between.

The stream is cut into chunks, each a whole number of blocks after the first, so that all of them start at the same
position in a block; one thread jumps to the start of a chunk (:mod:`bridge.compile.cpu.mt19937_jump`) and draws it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import (
    Buffer,
    BufferLoad,
    BufferStore,
    Expr,
    ForKind,
    IfThenElse,
    PrimFunc,
    Return,
    Stmt,
    Var,
)

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import INDEX, const, loop_function, sequence
from bridge.compile.cpu.mt19937 import BLOCK, FIRST, PER_BLOCK, elements, emit_loop, twist, working_buffer
from bridge.compile.cpu.mt19937_engine import LEFT, NEXT, SEEDED, WORDS, at_address, locked
from bridge.compile.cpu.mt19937_jump import jump

__all__ = ["CHUNK_FIELDS", "SEGMENT_FIELDS", "bernoulli_function"]

CHUNK_FIELDS = ("first_segment", "end_segment", "first_term", "end_term")
"""A chunk, four int64: its segments, and the terms of the polynomial that jumps to it (the first chunk needs none)."""

SEGMENT_FIELDS = ("mask", "offset", "count", "threshold")
"""What a chunk draws of one mask, four int64: its elements ``[offset, offset + count)``."""


def _copy(count: int, source: Buffer, offset: int, target: Buffer, to: int) -> Stmt:
    def word(e: Emitter, i: Var) -> None:
        e.stmts.append(BufferStore(target, BufferLoad(source, [i + const(offset)]), [i + const(to)]))

    return emit_loop(count, word)


def _fields(e: Emitter, table: Buffer, row: Expr, names: Sequence[str]) -> list[Expr]:
    return [
        e.bind(BufferLoad(table, [row * const(len(names)) + const(position)]), name)
        for position, name in enumerate(names)
    ]


def _draw(e: Emitter, words: Buffer, position: Buffer, mask: Buffer, count: Expr, threshold: Expr) -> None:
    """The next ``count`` elements; ``position`` is ``left`` and ``next`` of the block in ``words``."""
    left, begin = (e.bind(BufferLoad(position, [const(i)])) for i in range(2))
    odd = e.bind(tirx.truncmod(left - const(1), const(2)))
    early = e.bind(tirx.min(tirx.truncdiv(left - const(1), const(2)), count))  # elements of the block at hand
    blocks = e.bind(tirx.truncdiv(count - early + const(PER_BLOCK - 1), const(PER_BLOCK)))

    def block(inside: Emitter, i: Var) -> None:
        """What the block at hand still has (turn 0), what the i-th block after it has."""
        fresh = i > const(0)
        inside.stmts.append(IfThenElse(fresh, sequence(twist(words)), None))
        done = inside.bind(tirx.Select(fresh, early + (i - const(1)) * const(PER_BLOCK), const(0)))
        now = inside.bind(tirx.Select(fresh, tirx.min(count - done, const(PER_BLOCK)), early))
        at = inside.bind(tirx.Select(fresh, const(0) - odd, begin))
        inside.stmts += elements(words, at + const(FIRST), mask, done, now, threshold)
        inside.stmts.append(BufferStore(position, at + now * const(2), [const(1)]))

    e.stmts.append(emit_loop(blocks + const(1), block))
    new_next = BufferLoad(position, [const(1)])
    new_left = tirx.Select(blocks > const(0), const(BLOCK + 1) - new_next, left - early * const(2))
    e.stmts.append(BufferStore(position, new_left, [const(0)]))


@functools.cache
def bernoulli_function(parallel: bool) -> PrimFunc:
    """``(lock, engine, masks, chunks, segments, terms, count)``: fills masks and advances the engine.

    Element ``i`` of the stream takes the outputs ``2 i`` and ``2 i + 1``, the high and the low half of a 64-bit number;
    it is true where that number's low 53 bits are less than its segment's threshold.

    Arguments: addresses of a mutex, of an engine, of the masks' addresses (int64), of ``count`` chunks, of their
    segments (of all chunks, in the order of the stream), of the chunks' terms (uint16). Chunks begin ``k * PER_BLOCK``
    elements behind each other. ``parallel``: chunks on several threads; otherwise there is one.

    Returns 1; or 0 and does nothing if the lock cannot be taken or the engine is in no state to draw from.
    """
    names = ("lock", "engine", "masks", "chunks", "segments", "terms")
    params = {name: Var(f"{name}_address", INDEX) for name in names}
    count = Var("count", INDEX)
    types = {"engine": "uint32", "masks": INDEX, "chunks": INDEX, "segments": INDEX, "terms": "uint16"}
    memory, declared = {}, []
    for name, dtype in types.items():
        memory[name], stmts = at_address(params[name], dtype, name)
        declared += stmts
    engine = memory["engine"]
    start, start_room = stack_buffer(BLOCK, "uint32", "start")
    drawn, drawn_room = stack_buffer(1, INDEX, "drawn")

    head = Emitter(1)
    left, begin = (head.bind(tirx.Cast(INDEX, BufferLoad(engine, [const(at)]))) for at in (LEFT, NEXT))
    seeded = head.bind(BufferLoad(engine, [const(SEEDED)]) & tirx.const(0xFF, "uint32"))
    valid = tirx.all(seeded.equal(tirx.const(1, "uint32")), left >= const(1), begin + left - const(1) <= const(BLOCK))

    def chunk(e: Emitter, index: Expr) -> None:
        words, words_room = working_buffer()
        position, position_room = stack_buffer(2, INDEX, "position")
        first, end, first_term, end_term = _fields(e, memory["chunks"], index, CHUNK_FIELDS)
        stay = _copy(BLOCK, start, 0, words, FIRST)
        if parallel:
            moved = sequence(jump(start, words, memory["terms"], first_term, end_term))
            stay = IfThenElse(index > const(0), moved, stay)
        e.stmts += [words_room, position_room, stay]
        e.stmts += [BufferStore(position, value, [const(i)]) for i, value in enumerate((left, begin))]

        def segment(inside: Emitter, i: Var) -> None:
            number, offset, elements, threshold = _fields(inside, memory["segments"], first + i, SEGMENT_FIELDS)
            address = inside.bind(BufferLoad(memory["masks"], [number]) + offset)
            mask, stmts = at_address(address, "bool", "mask")
            inside.stmts += stmts
            _draw(inside, words, position, mask, elements, threshold)

        e.stmts.append(emit_loop(end - first, segment))
        store = [_copy(BLOCK, words, FIRST, engine, WORDS)]
        for i, at in enumerate((LEFT, NEXT)):
            store.append(BufferStore(engine, tirx.Cast("uint32", BufferLoad(position, [const(i)])), [const(at)]))
        e.stmts.append(IfThenElse((index + const(1)).equal(count), sequence(store), None))

    draw: Callable[[Emitter, Var], None] = chunk
    work = [_copy(BLOCK, engine, WORDS, start, 0)]
    work.append(emit_loop(count, draw, ForKind.PARALLEL if parallel else ForKind.SERIAL))
    work.append(BufferStore(drawn, const(1), [const(0)]))
    body = [
        *declared,
        start_room,
        drawn_room,
        BufferStore(drawn, const(0), [const(0)]),
        locked(params["lock"], [*head.stmts, IfThenElse(valid, sequence(work), None)]),
        Return(BufferLoad(drawn, [const(0)])),
    ]
    return loop_function([*params.values(), count], sequence(body))
