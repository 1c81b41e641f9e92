"""Measurements of this processor: what it attains and which product is faster, kept on disk.

Attainable rate: what the processor's multipliers do at most, measured with a kernel that does nothing else.
A library's product near that rate leaves nothing to gain, on whichever processor.

Measured products on disk: a class of products → seconds of its ways, measured once per machine and not once per
process.
Seconds are kept, not the choice: which way they speak for is decided anew, the same way in every process.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from typing import TypeVar

import torch
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.target import Target
from tvm.tirx import BufferLoad, BufferStore, Expr, PrimFunc, SeqStmt, Var

from bridge.artifact import current_store, made_once, of_this_package
from bridge.base.log import channel
from bridge.base.threads import serves
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import LoopScope, const, loop, loop_function
from bridge.compile.cpu.build import CpuLibraries, fingerprint
from bridge.compile.cpu.gemm_tile import register_tile
from bridge.compile.cpu.threads import end_team
from bridge.compile.runtime.build import settle
from bridge.compile.schedule.chain_plan import CallShape
from bridge.compile.schedule.products import ProductShape
from bridge.library import FORMS, FUNCTIONS, TensorAt, invoke

__all__ = ["attainable_rate", "in_a_plain_thread", "kept_times", "seconds_of", "seconds_of_forms"]

_LOG = channel("compile")

_BUDGET = 4e-3
"""Seconds after which no further round begins, once there were enough."""

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 20

_AT_A_TIME = 30e-6

_HOPELESS = 2.0
"""Times the fastest one's seconds, after two rounds, from which on a function is measured no further."""

Result = TypeVar("Result")


def seconds_of(
    functions: Mapping[str, Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
    at_a_time: float = _AT_A_TIME,
) -> dict[str, float]:
    """The shortest time of each function; others on the machine make it longer, never shorter.

    They take turns, so that a slow moment meets all of them. One that raises is left out.

    Args:
        at_a_time: seconds that are measured at a time: shorter functions run several times in a row.
    """
    started = clock()
    repeats: dict[str, int] = {}
    for name, function in functions.items():
        try:
            begun = clock()
            function()
        except (RuntimeError, ValueError, NotImplementedError) as error:  # what torch has no kernel for
            _LOG.debug("%s cannot be measured: %s", name, error)
            continue
        repeats[name] = max(1, math.ceil(at_a_time / max(clock() - begun, 1e-7)))
    best = dict.fromkeys(repeats, math.inf)
    for turn in range(_MOST_ROUNDS):
        if turn >= _FEWEST_ROUNDS and clock() - started > _BUDGET:
            break
        for name in best:
            if turn > 1 and best[name] > _HOPELESS * min(best.values()):
                continue
            function, count = functions[name], repeats[name]
            begun = clock()
            for _ in range(count):
                function()
            best[name] = min(best[name], (clock() - begun) / count)
    return best


def in_a_plain_thread(function: Callable[[], Result]) -> Result:
    """The function's result, from a thread of its own.

    Grad mode, autocast, inference mode, fake tensors' and other dispatch modes, ``torch.func`` transforms and the
    default device belong to a thread: none of the caller's is active there, and nothing done there changes them.
    The caller's OpenMP threads end first: beside them the others would sleep between two parallel regions.
    """

    def run() -> Result:
        torch.get_num_threads()  # a new thread's OpenMP setting becomes torch's when torch is first asked in it
        with torch.no_grad():
            return function()

    end_team()
    with ThreadPoolExecutor(1, "bridge-measure", serves) as pool:
        return pool.submit(run).result()


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

    def turn(body: LoopScope, _: Var) -> None:
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


_KIND = "product"


def kept_times(
    target: str,
    threads: int,
    product: ProductShape | str,
    ways: Sequence[str],
    measure: Callable[[], Mapping[str, float]],
) -> Mapping[str, float]:
    """What ``measure`` returns: seconds of some of the ways; from the disk cache where it was measured before.

    Args:
        target: what generated ways are built for.
        threads: that products run on.
        product: the class, or a chain of products as text.
        ways: the candidates.
    """
    store = current_store()
    if not store.is_usable:
        return measure()
    plain = product if isinstance(product, str) else astuple(product)
    key = of_this_package(_KIND, target, threads, fingerprint(), str(product), plain, list(ways))

    def look() -> Mapping[str, float] | None:
        found = store.get(_KIND, key)
        return None if found is None else json.loads(found.parts["seconds"])

    def measure_and_keep() -> Mapping[str, float]:
        times = dict(measure())
        store.put(_KIND, key, {"seconds": json.dumps(times).encode()}, f"{product} on {threads} threads")
        return times

    return made_once(store, key, look, measure_and_keep)


_ROUNDING = 1e-3
"""Of the largest number, that two orders of the same sums may differ by; what is wrong differs by more."""


def seconds_of_forms(call: CallShape) -> Mapping[str, float]:
    """Seconds of the function itself, first, and of its forms; those that are not for such arguments are left out."""
    settle()
    return in_a_plain_thread(lambda: seconds_of(_runs(call)))


def _runs(call: CallShape) -> dict[str, Callable[[], list[torch.Tensor]]]:
    tensors = list(map(_tensor, call.operands))
    arguments = [TensorAt(int(each[1:])) if isinstance(each, str) else each for each in call.arguments]
    names = [name for name in (call.name, *FORMS[call.name]) if name in FUNCTIONS]
    runs = {name: partial(invoke, FUNCTIONS[name], arguments, tensors) for name in names}
    wanted = runs[call.name]()
    return {name: run for name, run in runs.items() if name == call.name or _is_same(name, run, wanted)}


def _tensor(operand: tuple[str, tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    """Numbers in memory as the operand's lie."""
    name, extents, strides = operand
    tensor = torch.empty_strided(extents, strides, dtype=getattr(torch, name))
    generator = torch.Generator().manual_seed(0)
    return tensor.copy_(torch.randn(extents, generator=generator))


def _is_same(name: str, run: Callable[[], list[torch.Tensor]], wanted: list[torch.Tensor]) -> bool:
    try:
        found = run()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        _LOG.debug("%s is no form of a call: %s", name, error)
        return False
    pairs = list(zip(found, wanted, strict=True))
    alike = all(mine.shape == its.shape and mine.dtype == its.dtype for mine, its in pairs)
    return alike and all((mine - its).abs().max() <= _ROUNDING * its.abs().max() for mine, its in pairs)
