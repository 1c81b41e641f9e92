"""torch's Mersenne Twister in TIR: a state → random words, draws, and states further on.

Vector code: twist, temper, compare with a threshold. The engine holds a *block* of 624 words. It is *twisted* into the
next one; an output is a *tempered* word of the block. The recurrence (Matsumoto and Nishimura, "Mersenne Twister", ACM
TOMACS 8, 1998)

    word[i] = word[i + 397] ^ f(word[i], word[i + 1])        indices modulo 624

reaches back over at least 227 words, so sixteen of them at a time are independent.

Jumping ahead: a block and a polynomial over GF(2) → a block far after it. The words of the twister are a linear
recurrence of degree 19937 with characteristic polynomial P. If ``x^n mod P`` is the sum of ``x^i`` over a set of ``i``,
then word ``n + k`` is the exclusive or of the words ``i + k`` over that set, for every ``k`` (Haramoto, Matsumoto,
Nishimura, Panneton and L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number Generators", INFORMS Journal on
Computing 20, 2008). :mod:`bridge.rng.cpu` computes the sets. Word 0 is not part of the recurrence, which reads only its
highest bit, and a seed leaves its other bits arbitrary. So words are counted from 1.

A CPU generator of torch in memory: its mutex, which its own draws lock, and its engine, in words of 32 bits.
    words 0-1    the seed
    word 2       ``left``, int32: the number of outputs that the current block still has, plus one
    word 3       ``seeded``, one byte
    word 4       ``next``, uint32: index of the next output in the block
    words 5-628  the block
    word 629     unused
    words 630-   cached normal numbers, a float32 and a float64, each followed by a flag byte

:mod:`bridge.rng.engine` verifies this layout at run time. Only compiled code holds the lock, and never raises or waits
for the interpreter, because a thread with the interpreter's lock may wait for the generator's.

Bernoulli masks from a generator of torch, in place: lock, draw, unlock in one call without Python in between. The
stream is cut into chunks, each a whole number of blocks after the first, so that all chunks start at the same position
in a block; one thread jumps to the start of a chunk and draws it.

Proof of a lock: a compiled function holds a mutex until another thread waits for it. It runs without the interpreter's
lock and always releases the mutex itself, so no thread can wait for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import PointerType, PrimType, StringImm
from tvm.tirx import (
    Bind,
    Buffer,
    BufferLoad,
    BufferStore,
    DeclBuffer,
    Expr,
    ForKind,
    IfThenElse,
    PrimFunc,
    Ramp,
    Return,
    Stmt,
    Var,
)

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import INDEX, const, loop, loop_function, sequence
from bridge.compile.cpu.backend import LANES

__all__ = ["BLOCK", "CHUNK_FIELDS", "DEGREE", "DOUBLE", "FIRST", "FLOAT", "LEFT", "NEXT", "PER_BLOCK", "SEEDED"]
__all__ += ["SEGMENT_FIELDS", "STATE_WORDS", "WORDS", "at_address", "bernoulli_function", "elements", "emit_loop"]
__all__ += ["hold_function", "jump", "load", "locked", "next_words", "swap_function", "twist", "working_buffer"]


_TURNS = 200_000
"""Iterations of 50 us each: ten seconds. Starting a thread takes less than one iteration."""

_HOLD = """
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @usleep(i32)

define i64 @bridge_hold(i64 %lock.address, i64 %stage.address) {
entry:
  %lock = inttoptr i64 %lock.address to ptr
  %stage = inttoptr i64 %stage.address to ptr
  %failed = call i32 @pthread_mutex_lock(ptr %lock)
  %is.locked = icmp eq i32 %failed, 0
  br i1 %is.locked, label %held, label %refused
refused:
  ret i64 0
held:
  store atomic i64 1, ptr %stage seq_cst, align 8
  br label %look
look:
  %turn = phi i64 [ 0, %held ], [ %next, %sleep ]
  %word = load atomic i32, ptr %lock seq_cst, align 4
  %is.awaited = icmp eq i32 %word, 2  ; glibc: 0 free, 1 locked, 2 locked and somebody sleeps until it is free
  %now = load atomic i64, ptr %stage seq_cst, align 8
  %went.on = icmp eq i64 %now, 2
  %late = icmp eq i64 %turn, TURNS
  %stop = or i1 %went.on, %late
  %end = or i1 %is.awaited, %stop
  br i1 %end, label %leave, label %sleep
sleep:
  %ignored = call i32 @usleep(i32 50)
  %next = add i64 %turn, 1
  br label %look
leave:
  %unlocked = call i32 @pthread_mutex_unlock(ptr %lock)
  %good = xor i1 %stop, true
  %proven = and i1 %is.awaited, %good
  %result = zext i1 %proven to i64
  ret i64 %result
}
"""


@functools.cache
def hold_function() -> PrimFunc:
    """``(lock, stage)``, addresses of a mutex and of an int64: 1 if another thread came to wait for the mutex, else 0.

    Locks the mutex, sets ``stage`` to 1, and unlocks it once a thread waits, ``stage`` is 2 or ten seconds have passed.
    """
    params = [Var(name, INDEX) for name in ("lock", "stage")]
    result = Return(tirx.call_extern(INDEX, "bridge_hold", *params))
    text = StringImm(_HOLD.replace("TURNS", str(_TURNS)))
    return loop_function(params, tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, result))


@functools.cache
def swap_function() -> PrimFunc:
    """``(lock, engine, expected, new)``, addresses of a mutex and three engines: compare and swap under the mutex.

    Returns 1 and sets ``engine`` to ``new`` if it equals ``expected``; otherwise returns 0 and changes nothing. No
    other thread may use ``expected`` and ``new``.
    """
    params = [Var(f"{name}_address", INDEX) for name in ("lock", "engine", "expected", "new")]
    buffers, declared = [], []
    for param in params[1:]:
        buffer, stmts = at_address(param, "uint32", param.name.removesuffix("_address"))
        buffers.append(buffer)
        declared += stmts
    engine, expected, new = buffers
    differs, room = stack_buffer(1, "uint32", "differs")

    def note(bits: Expr) -> Stmt:
        return BufferStore(differs, BufferLoad(differs, [const(0)]) | bits, [const(0)])

    def word(buffer: Buffer, at: Expr | int) -> Expr:
        return BufferLoad(buffer, [const(at) if isinstance(at, int) else at])

    def flag(buffer: Buffer, at: int) -> Expr:
        return word(buffer, at) & tirx.const(0xFF, "uint32")

    def compare(e: Emitter, i: Var) -> None:
        e.stmts.append(note(word(engine, i + const(NEXT)) ^ word(expected, i + const(NEXT))))

    def copy(e: Emitter, i: Var) -> None:
        e.stmts.append(BufferStore(engine, word(new, i), [i]))

    stmts = [
        BufferStore(differs, tirx.const(0, "uint32"), [const(0)]),
        note(word(engine, LEFT) ^ word(expected, LEFT)),
        note(flag(engine, SEEDED) ^ flag(expected, SEEDED)),
        emit_loop(1 + BLOCK, compare),
    ]
    for number, words, has in ((FLOAT, 1, FLOAT + 1), (DOUBLE, 2, DOUBLE + 2)):
        stmts.append(note(flag(engine, has) ^ flag(expected, has)))
        bits = [note(word(engine, at) ^ word(expected, at)) for at in range(number, number + words)]
        there = flag(engine, has).equal(tirx.const(1, "uint32"))
        stmts.append(IfThenElse(there, sequence(bits), None))
    same = word(differs, 0).equal(tirx.const(0, "uint32"))
    stmts.append(IfThenElse(same, emit_loop(STATE_WORDS, copy), None))
    failed = BufferStore(differs, tirx.const(1, "uint32"), [const(0)])
    result = Return(tirx.Select(same, const(1), const(0)))
    return loop_function(params, sequence([*declared, room, failed, locked(params[0], stmts), result]))


BLOCK = 624
"""Words of a block."""

PER_BLOCK = BLOCK // 2
"""Elements of a mask per block: each takes two outputs."""

FIRST = LANES
"""Index of the block in the working buffer. The word before it is the last word of the preceding block, the first half
of an element if blocks and elements do not start together; after the block is room for a copy of its head."""

_SHIFT = 397  # distance of the recurrence, in words
_REACH = BLOCK - _SHIFT  # words whose operand belongs to the old block
_HEAD = -(-_REACH // LANES) * LANES  # in whole vectors
_UPPER, _LOWER, _MATRIX = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_MANTISSA = (1 << 53) - 1
_PAIRS = LANES // 2  # elements of a vector

emit_loop = functools.partial(loop, scope=functools.partial(Emitter, 1))
"""A loop whose body emits through a scalar emitter."""


def working_buffer() -> tuple[Buffer, Stmt]:
    """A block's working buffer on the stack, and its allocation."""
    return stack_buffer(FIRST + BLOCK + _HEAD, "uint32", "words")


def load(e: Emitter, words: Buffer, at: Expr) -> Expr:
    return e.bind(BufferLoad(words, [e.index(at, 1)]))


def next_words(scalars: Emitter, words: Buffer, old: Expr, far: Expr, at: Expr) -> Expr:
    """Stores, at ``at``, and returns the words one block after ``old``; ``far``: ``_SHIFT`` words after ``old``."""
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
    """Computes the next block in place; the last word of the old block goes before it.

    Vectors from the left: the words that a vector reads of the old block are not overwritten yet, and the words of the
    new block are complete. The first part is also written after the block's end: for the vector in which the
    recurrence's distant operand passes from the old block to the new one, and for the last word's neighbour.
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
    bits = pairs.bind(pairs.reinterpret(outputs, "uint64"))  # the first output must become the high half
    bits = ((bits << half) | (bits >> half)) & pairs.const(_MANTISSA, "uint64")
    drawn = pairs.cast(bits, "int64") < pairs.broadcast(threshold)
    pairs.stmts.append(BufferStore(mask, drawn, [pairs.index(to, 1)]))
    return pairs.stmts


def elements(words: Buffer, at: Expr, mask: Buffer, to: Expr, count: Expr, threshold: Expr) -> list[Stmt]:
    """Draws ``count`` elements: vectors, then single ones."""
    whole = tirx.truncdiv(count, const(_PAIRS))

    def vector(e: Emitter, i: Var) -> None:
        step = i * const(_PAIRS)
        e.stmts += _compare(words, at + step * const(2), mask, to + step, threshold, _PAIRS)

    def single(e: Emitter, i: Var) -> None:
        step = whole * const(_PAIRS) + i
        e.stmts += _compare(words, at + step * const(2), mask, to + step, threshold, 1)

    return [emit_loop(whole, vector), emit_loop(count - whole * const(_PAIRS), single)]


DEGREE = 19937
"""Degree of the characteristic polynomial."""

_STRIP = 3  # vectors of the result that are summed at a time, in registers
_WORDS = -(-(DEGREE + BLOCK) // BLOCK) * BLOCK  # contains the windows of all terms


def jump(start: Buffer, words: Buffer, terms: Buffer, begin: Expr, end: Expr) -> list[Stmt]:
    """Sets the block of ``words`` to the block ``n + 1`` words after ``start``.

    Args:
        start: a block, [624].
        words: a working buffer.
        terms: uint16; ``terms[begin:end]`` is the set of ``i`` for a distance of ``n`` words.
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


LEFT, SEEDED, NEXT, WORDS = 2, 3, 4, 5
FLOAT = WORDS + BLOCK + 1
"""The cached float32; the word after it is its flag."""
DOUBLE = FLOAT + 2
"""The cached float64; the second word after it is its flag."""
STATE_WORDS = DOUBLE + 4


def at_address(address: Expr, dtype: str, name: str) -> tuple[Buffer, list[Stmt]]:
    """Memory at an address as a flat buffer, and its declarations."""
    kind = PointerType(PrimType(dtype))
    pointer = Var(f"{name}_pointer", kind)
    buffer = tirx.decl_buffer((1 << 40,), dtype, name, data=pointer, data_alignment=1)
    return buffer, [Bind(pointer, tirx.reinterpret(kind, address)), DeclBuffer(buffer, data=pointer)]


def locked(lock: Expr, stmts: Sequence[Stmt]) -> Stmt:
    """Statements that run while the mutex at an address is held; none of them run if it cannot be taken."""

    def call(name: str) -> Expr:
        return tirx.call_extern("int32", name, tirx.reinterpret("handle", lock))

    unlock = tirx.Evaluate(call("pthread_mutex_unlock"))
    return IfThenElse(call("pthread_mutex_lock").equal(tirx.const(0, "int32")), sequence([*stmts, unlock]), None)


CHUNK_FIELDS = ("first_segment", "end_segment", "first_term", "end_term")
"""A chunk, four int64: its segments, and the terms of the polynomial that jumps to it (the first chunk needs none)."""

SEGMENT_FIELDS = ("mask", "offset", "count", "threshold")
"""A chunk's part of one mask, four int64: its elements ``[offset, offset + count)``."""


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
    """Draws the next ``count`` elements; ``position``: ``left`` and ``next`` of the block in ``words``."""
    left, begin = (e.bind(BufferLoad(position, [const(i)])) for i in range(2))
    odd = e.bind(tirx.truncmod(left - const(1), const(2)))
    early = e.bind(tirx.min(tirx.truncdiv(left - const(1), const(2)), count))  # elements of the current block
    blocks = e.bind(tirx.truncdiv(count - early + const(PER_BLOCK - 1), const(PER_BLOCK)))

    def block(inside: Emitter, i: Var) -> None:
        """Draws the rest of the current block (iteration 0), or from the i-th block after it."""
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
    it is true if that number's low 53 bits are less than its segment's threshold.

    Arguments: addresses of a mutex, of an engine, of the masks' addresses (int64), of ``count`` chunks, of their
    segments (of all chunks, in stream order), of the chunks' terms (uint16). Chunks begin ``k * PER_BLOCK`` elements
    apart. ``parallel``: chunks on several threads; otherwise there is one chunk.

    Returns 1; or 0, without effect, if the lock cannot be taken or the engine's state is invalid.
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
