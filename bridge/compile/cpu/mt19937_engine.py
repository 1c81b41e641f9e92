"""A CPU generator of torch's as memory: its mutex, which its own draws lock, and its engine, in words of 32 bits.

    words 0-1    the seed
    word 2       ``left``, int32: one more than the outputs that the current block still has
    word 3       ``seeded``, one byte
    word 4       ``next``, uint32: index of the next output in the block
    words 5-628  the block
    word 629     nothing
    words 630-   normal numbers drawn ahead, a float32 and a float64, each with a byte that says whether there is one

Nobody is asked to believe that: :mod:`bridge.rng.engine` looks and tries. The lock is held by compiled code only, which
neither raises nor waits for the interpreter: whoever holds the interpreter's lock may wait for the generator's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import Bind, Buffer, DeclBuffer, Expr, IfThenElse, Stmt, Var

from bridge.compile.codegen.tir import sequence
from bridge.compile.cpu.mt19937 import BLOCK

__all__ = ["DOUBLE", "FLOAT", "LEFT", "NEXT", "SEEDED", "STATE_WORDS", "WORDS", "at_address", "locked"]

LEFT, SEEDED, NEXT, WORDS = 2, 3, 4, 5
FLOAT = WORDS + BLOCK + 1
"""The float32; the word after it says whether there is one."""
DOUBLE = FLOAT + 2
"""The float64; the second word after it says whether there is one."""
STATE_WORDS = DOUBLE + 4


def at_address(address: Expr, dtype: str, name: str) -> tuple[Buffer, list[Stmt]]:
    """Memory at an address as a flat buffer, and the statements that declare it."""
    kind = PointerType(PrimType(dtype))
    pointer = Var(f"{name}_pointer", kind)
    buffer = tirx.decl_buffer((1 << 40,), dtype, name, data=pointer, data_alignment=1)
    return buffer, [Bind(pointer, tirx.reinterpret(kind, address)), DeclBuffer(buffer, data=pointer)]


def locked(lock: Expr, stmts: Sequence[Stmt]) -> Stmt:
    """Statements that run while the mutex at an address is held; none of them if it cannot be taken."""

    def call(name: str) -> Expr:
        return tirx.call_extern("int32", name, tirx.reinterpret("handle", lock))

    unlock = tirx.Evaluate(call("pthread_mutex_unlock"))
    return IfThenElse(call("pthread_mutex_lock").equal(tirx.const(0, "int32")), sequence([*stmts, unlock]), None)
