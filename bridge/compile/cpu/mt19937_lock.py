"""Proof of a lock: a compiled function that holds a mutex until another thread waits for it.

It runs without the interpreter's lock and lets go of the mutex by itself, so nothing can wait for ever, whatever the
other thread does and however it was found.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import StringImm
from tvm.tirx import PrimFunc, Return, Var

from bridge.compile.codegen.tir import INDEX, loop_function

__all__ = ["hold_function"]

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
