"""Attainable rate: what the processor's multipliers do at most, measured with a kernel that does nothing else.

A library's product near that rate leaves nothing to gain, on whichever processor.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.target import Target
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, PrimFunc, SeqStmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import Scope, const, loop, loop_function
from bridge.compile.cpu.build import CpuLibraries
from bridge.compile.cpu.measure import in_a_plain_thread, seconds_of

__all__ = ["attainable_rate"]

_LANES = 16
_CHAINS = 12
"""Vectors that are multiplied and added to independently: enough to hide a fused multiply-add's latency."""

_TURNS = 20_000


@functools.cache
def attainable_rate(target: Target) -> float:
    """Floating point operations per second of one thread, in float32; in float64 it is half of that.

    Measured once per process: a tenth of a millisecond, and some hundredths of a second to build the kernel.
    """
    kernel = CpuLibraries(target).build({"multiply_add": _function()}, True)["multiply_add"]

    def seconds() -> float:
        factor, sums = torch.full((_LANES,), 0.5), torch.zeros(_CHAINS * _LANES)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (factor, sums)]
        return seconds_of({"multiply_add": lambda: kernel(*addresses)})["multiply_add"]

    return 2 * _CHAINS * _LANES * _TURNS / in_a_plain_thread(seconds)


def _function() -> PrimFunc:
    """``sums = sums * factor + factor``, ``_TURNS`` times."""
    params = [Var(name, PointerType(PrimType("float32"))) for name in ("factor", "sums")]
    factor, sums = (tirx.decl_buffer((1 << 20,), "float32", p.name, data=p, data_alignment=4) for p in params)
    chains, allocation = stack_buffer(_CHAINS * _LANES, "float32", "chains")

    def vector(buffer: Buffer, chain: int) -> Expr:
        return BufferLoad(buffer, [_at(chain)])

    def turn(body: Scope, _: Var) -> None:
        emit = Emitter(_LANES)
        by = emit.bind(vector(factor, 0))
        for chain in range(_CHAINS):
            emit.stmts.append(BufferStore(chains, emit.fma(vector(chains, chain), by, by), [_at(chain)]))
        body.add(*emit.stmts)

    enter = [BufferStore(chains, vector(sums, chain), [_at(chain)]) for chain in range(_CHAINS)]
    leave = [BufferStore(sums, vector(chains, chain), [_at(chain)]) for chain in range(_CHAINS)]
    declared = [tirx.DeclBuffer(buffer, data=param) for buffer, param in zip((factor, sums), params, strict=True)]
    return loop_function(params, SeqStmt([*declared, allocation, *enter, loop(_TURNS, turn), *leave]))


def _at(chain: int) -> Expr:
    return tirx.Ramp(const(chain * _LANES), const(1), _LANES)
