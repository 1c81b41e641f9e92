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
from tvm.tirx import BufferLoad, BufferStore, Expr, PrimFunc, SeqStmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import Scope, const, loop, loop_function
from bridge.compile.cpu.build import CpuLibraries
from bridge.compile.cpu.gemm_buffers import register_tile
from bridge.compile.cpu.measure import in_a_plain_thread, seconds_of

__all__ = ["attainable_rate"]

_LANES = 4
"""Of a processor without a register tile."""

_CHAINS = 12
"""Vectors that are multiplied and added to independently: enough to hide a fused multiply-add's latency, and no more
than registers hold."""

_TURNS = 20_000


@functools.cache
def attainable_rate(target: Target) -> float:
    """Floating point operations per second of one thread, in float32; in float64 it is half of that.

    Measured once per process: a tenth of a millisecond, and some hundredths of a second to build the kernel.
    """
    tile = register_tile(target)
    lanes = _LANES if tile is None else tile.lanes("float32")
    kernel = CpuLibraries(target).build({"multiply_add": _function(lanes)}, True)["multiply_add"]

    def seconds() -> float:
        factor, sums = torch.full((lanes,), 0.5), torch.zeros(_CHAINS * lanes)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (factor, sums)]
        return seconds_of({"multiply_add": lambda: kernel(*addresses)})["multiply_add"]

    return 2 * _CHAINS * lanes * _TURNS / in_a_plain_thread(seconds)


def _function(lanes: int) -> PrimFunc:
    """``sums = sums * factor + factor``, ``_TURNS`` times, in vectors of so many elements."""
    params = [Var(name, PointerType(PrimType("float32"))) for name in ("factor", "sums")]
    factor, sums = (tirx.decl_buffer((1 << 20,), "float32", p.name, data=p, data_alignment=4) for p in params)
    chains, allocation = stack_buffer(_CHAINS * lanes, "float32", "chains")

    def at(chain: int) -> Expr:
        return tirx.Ramp(const(chain * lanes), const(1), lanes)

    def turn(body: Scope, _: Var) -> None:
        emit = Emitter(lanes)
        by = emit.bind(BufferLoad(factor, [at(0)]))
        for chain in range(_CHAINS):
            total = emit.fma(BufferLoad(chains, [at(chain)]), by, by)
            emit.stmts.append(BufferStore(chains, total, [at(chain)]))
        body.add(*emit.stmts)

    enter = [BufferStore(chains, BufferLoad(sums, [at(chain)]), [at(chain)]) for chain in range(_CHAINS)]
    leave = [BufferStore(sums, BufferLoad(chains, [at(chain)]), [at(chain)]) for chain in range(_CHAINS)]
    declared = [tirx.DeclBuffer(buffer, data=param) for buffer, param in zip((factor, sums), params, strict=True)]
    return loop_function(params, SeqStmt([*declared, allocation, *enter, loop(_TURNS, turn), *leave]))
