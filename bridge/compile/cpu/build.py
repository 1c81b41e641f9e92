"""Machine code for the CPU: PrimFuncs → a library by TVM's LLVM, for this processor's features."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.base.log import channel
from bridge.compile.codegen.tir import lower_loops
from bridge.compile.cpu.threads import CONNECT, connect_function, launcher
from bridge.compile.runtime.build import REFUSALS, library_bytes, loaded

__all__ = ["CpuLibraries", "features", "fingerprint", "kernel_source", "llvm_version", "model"]

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
LayerNorm-LSTM take as long as at level 3, the default, in two thirds of its compilation.
"""


def _compiled(funcs: Mapping[str, PrimFunc], target: Target) -> tvm.runtime.Module:
    module = IRModule({name: func.with_attr("global_symbol", name) for name, func in funcs.items()})
    return tvm.tirx.build(module, Target({**target.export(), **_LEVEL_OF_LOOPS}), pipeline="bridge_loops")


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

    def build(self, functions: Mapping[str, PrimFunc]) -> tvm.runtime.Module:
        return _connected(self._unconnected(functions))

    def build_bytes(self, functions: Mapping[str, PrimFunc]) -> tuple[tvm.runtime.Module, bytes | None]:
        """LLVM's object code, linked, and loaded as another process would load it; the same machine code."""
        library = self._unconnected(functions)
        try:
            content = library_bytes(library)
            return self.load(content), content
        except REFUSALS as error:
            _LOG.info("kernels are not kept: %s", error)
            return _connected(library), None

    def load(self, content: bytes) -> tvm.runtime.Module:
        return _connected(loaded(content))

    def _unconnected(self, functions: Mapping[str, PrimFunc]) -> tvm.runtime.Module:
        more = {} if launcher() is None else {CONNECT: connect_function()}
        return _compiled({**functions, **more}, self.target)


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
    return _compiled({name: func}, target).inspect_source(_FORMS[form])
