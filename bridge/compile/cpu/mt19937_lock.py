"""A generator's lock: the proof that a compiled function holds it; compare and swap of the state under it.

Proof of a lock: a compiled function that holds a mutex until another thread waits for it.
It runs without the interpreter's lock and lets go of the mutex by itself, so nothing can wait for ever, whatever the
other thread does and however it was found.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import StringImm
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, PrimFunc, Return, Stmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import INDEX, const, loop_function, sequence
from bridge.compile.cpu.mt19937 import (
    BLOCK,
    DOUBLE,
    FLOAT,
    LEFT,
    NEXT,
    SEEDED,
    STATE_WORDS,
    at_address,
    emit_loop,
    locked,
)

__all__ = ["hold_function", "swap_function"]

_TURNS = 200_000
"""Of 50 us each: ten seconds. A thread that is started takes less than one of them."""

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

    Locks the mutex, sets ``stage`` to 1, and unlocks it once somebody waits, ``stage`` is 2 or ten seconds are over.
    """
    params = [Var(name, INDEX) for name in ("lock", "stage")]
    result = Return(tirx.call_extern(INDEX, "bridge_hold", *params))
    text = StringImm(_HOLD.replace("TURNS", str(_TURNS)))
    return loop_function(params, tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, result))


@functools.cache
def swap_function() -> PrimFunc:
    """``(lock, engine, expected, new)``, addresses of a mutex and three engines: 1 if ``engine`` was as ``expected``.

    Then it is as ``new`` afterwards; else nothing is done and 0 returned. The last two belong to nobody else.
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
