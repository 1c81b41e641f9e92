"""Compare and swap of a generator's state under its lock: nobody draws between the comparison and the replacement."""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, PrimFunc, Return, Stmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import INDEX, const, loop_function, sequence
from bridge.compile.cpu.mt19937 import BLOCK, emit_loop
from bridge.compile.cpu.mt19937_engine import DOUBLE, FLOAT, LEFT, NEXT, SEEDED, STATE_WORDS, at_address, locked

__all__ = ["swap_function"]


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
