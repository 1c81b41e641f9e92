"""Machine code for the CPU: PrimFuncs → a library by TVM's LLVM, for this processor's features.

Attainable rate: the processor's peak rate of multiply-adds, measured with a kernel that does nothing else. A library
product near that rate leaves nothing to gain.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import tirx
from tvm.ir import IRModule, PointerType, PrimType
from tvm.target import Target
from tvm.tirx import BufferLoad, BufferStore, Expr, PrimFunc, SeqStmt, Var

from bridge.base.log import channel
from bridge.base.torch_internals import VF
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import LOOPS_ATTR, LoopScope, const, loop, loop_function, lower_loops
from bridge.compile.cpu.gemm_tile import register_tile
from bridge.compile.cpu.threads import CONNECT, connect_function, in_a_plain_thread, launcher
from bridge.compile.runtime.build import REFUSALS, library_bytes, loaded
from bridge.trials import seconds_of

__all__ = ["CpuLibraries", "attainable_rate", "features", "fingerprint", "kernel_source", "llvm_version", "model"]

_SETTINGS = ("MKL_", "OMP_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "OPENBLAS_")
"""Prefixes of environment variables that configure libraries of matrix products."""


def fingerprint() -> tuple:
    """The dependencies of timings: the processor, the number of processors, the libraries' environment variables."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS))
    return model(), features(), os.cpu_count(), tuple(settings)


@functools.cache
def features() -> str:
    """The processor features that LLVM detects; a virtual machine may have fewer than its processor's name implies."""
    found = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return " ".join(sorted(str(name) for name, there in dict(found or {}).items() if bool(there)))


@functools.cache
def llvm_version() -> str:
    return str(tvm.get_global_func("target.llvm_version_major")())


@functools.cache
def model() -> str:
    """The processor's name, as in ``"AMD EPYC 9V74 80-Core Processor"``."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in told.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.processor())


_LOG = channel("cache")

#: Form of a kernel's text → the format name of TVM's LLVM modules (``None``: not compiled at all).
_FORMS = {"tvmscript": None, "llvm": "ll", "asm": "s"}

tirx.register_tir_pipeline("bridge_loops", lower_loops)

_LEVEL_OF_LOOPS = {"opt-level": 1}
"""LLVM's optimization of generated loops, which are in vectors and blocks already: the kernels of BERT, ResNet-50 and a
LayerNorm-LSTM take as long as at level 3, the default, in two thirds of its compilation. TVM's own loops need level 3.
"""


def _compiled(funcs: Mapping[str, PrimFunc], target: Target, loops: bool) -> tvm.runtime.Module:
    module = IRModule({name: func.with_attr("global_symbol", name) for name, func in funcs.items()})
    if loops:
        target = Target({**target.export(), **_LEVEL_OF_LOOPS})
    return tvm.tirx.build(module, target, pipeline="bridge_loops" if loops else "default")


@dataclass(frozen=True)
class CpuLibraries:
    """Libraries of functions for a target, a :class:`~bridge.compile.runtime.kernel_store.Libraries`.

    Their parallel loops run on torch's threads if :mod:`bridge.compile.cpu.threads` supports that here.
    """

    target: Target

    @property
    def key(self) -> tuple[str, ...]:
        """The target, the processor features that LLVM detects, LLVM's version, the launcher of parallel loops."""
        return str(self.target), features(), llvm_version(), "tvm" if launcher() is None else "torch"

    def build(self, functions: Mapping[str, PrimFunc], loops: bool) -> tvm.runtime.Module:
        return _connected(self._unconnected(functions, loops))

    def build_bytes(self, functions: Mapping[str, PrimFunc], loops: bool) -> tuple[tvm.runtime.Module, bytes | None]:
        """LLVM's object code, linked, and loaded as another process would load it; the same machine code."""
        library = self._unconnected(functions, loops)
        try:
            content = library_bytes(library)
            return self.load(content), content
        except REFUSALS as error:
            _LOG.info("kernels are not kept: %s", error)
            return _connected(library), None

    def load(self, content: bytes) -> tvm.runtime.Module:
        return _connected(loaded(content))

    def _unconnected(self, functions: Mapping[str, PrimFunc], loops: bool) -> tvm.runtime.Module:
        more = {} if launcher() is None else {CONNECT: connect_function()}
        return _compiled({**functions, **more}, self.target, loops)


def _connected(library: tvm.runtime.Module) -> tvm.runtime.Module:
    address = launcher()
    if address is not None:
        library[CONNECT](address)
    return library


def kernel_source(func: PrimFunc, name: str, target: Target, form: str) -> str:
    """A kernel as text; compiled forms are compiled anew, as by :class:`CpuLibraries`.

    Raises:
        ValueError: ``form`` is not one of ``"tvmscript"``, ``"llvm"``, ``"asm"``.
    """
    if form not in _FORMS:
        raise ValueError(f"form: wanted one of {', '.join(map(repr, _FORMS))}, got {form!r}")
    if _FORMS[form] is None:
        return func.with_attr("global_symbol", name).script()
    library = _compiled({name: func}, target, bool(func.attrs.get(LOOPS_ATTR, False)))
    return library.inspect_source(_FORMS[form])


_LANES = 4
"""For a processor without a register tile."""

_CHAINS = 12
"""Independent vectors of multiply-adds: enough to hide the latency of one, and few enough for the registers."""

_TURNS = 20_000


@functools.cache
def attainable_rate(target: Target) -> float:
    """Floating point operations per second of one thread in float32; float64 has half of that.

    Measured once per process: a tenth of a millisecond, and some hundredths of a second to build the kernel.
    """
    tile = register_tile(target)
    lanes = _LANES if tile is None else tile.lanes("float32")
    kernel = CpuLibraries(target).build({"multiply_add": _function(lanes)}, True)["multiply_add"]

    def seconds() -> float:
        factor, sums = VF.full((lanes,), 0.5), VF.zeros(_CHAINS * lanes)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (factor, sums)]
        return seconds_of({"multiply_add": lambda: kernel(*addresses)})["multiply_add"]

    return 2 * _CHAINS * lanes * _TURNS / in_a_plain_thread(seconds)


def _function(lanes: int) -> PrimFunc:
    """``sums = sums * factor + factor``, ``_TURNS`` times, in vectors of ``lanes`` elements."""
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
