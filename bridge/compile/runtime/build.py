"""Building: PrimFuncs → machine code, in one call of the compiler for all that the process has not built before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc
from tvm_ffi import structural_equal, structural_hash

from bridge.base.interrupts import raise_deferred
from bridge.compile.codegen.tir import LOOPS_ATTR, SHARED_ATTR
from bridge.compile.cpu.threads import CONNECT, connect_function, launcher
from bridge.compile.runtime.cache import WeakCache

__all__ = ["Built", "build_kernels", "clear_kernels"]


@dataclass(eq=False)
class Built:
    """A kernel's machine code: it is freed when nobody holds this object or the function."""

    function: tvm_ffi.Function


_KERNELS: WeakCache[PrimFunc, Built] = WeakCache(structural_equal)
_LOCK = threading.Lock()

_SHARED: list[Built] = []


def _loop_pipeline() -> tuple[tvm.transform.Pass, Callable, Callable]:
    """Lowering for kernels that are loops already: the passes that the packed calling convention needs, no others.

    TVM's default pipeline simplifies under an analyzer that substitutes every bound variable by its value, which is
    exponential in the length of a chain of bindings (a polynomial is one). Nothing here does that.

    The calling convention's checks of every argument (number of dimensions, each extent, dtype, device, strides) are
    more code than most kernels and take more than half of LLVM's time. A kernel is called only by the Program that it
    was built for, which checks its inputs once per call and makes everything else itself; so they are left out.
    """
    passes = tvm.transform.Sequential(
        [
            tirx.transform.BF16ComputeLegalize(),
            tirx.transform.VerifyMemory(),
            tirx.transform.AnnotateEntryFunc(),
            tirx.transform.SplitHostDevice(),
            tirx.transform.MakePackedAPI(),
            tirx.transform.SkipAssert(),
            tirx.transform.BF16StorageLegalize(),
        ]
    )
    return passes, lambda: tirx.transform.LowerTVMBuiltin(), lambda: tvm.transform.Sequential([])


tirx.register_tir_pipeline("bridge_loops", _loop_pipeline)


def clear_kernels() -> None:
    """Forget every kernel built in this process."""
    with _LOCK:
        _KERNELS.clear()
        _SHARED.clear()


def _library_of(name: str, func: PrimFunc) -> tuple[str, str]:
    """The pipeline that lowers a function, and what it shares a library with: its own name or all the others."""
    pipeline = "bridge_loops" if func.attrs.get(LOOPS_ATTR, False) else "default"
    return pipeline, name if func.attrs.get(SHARED_ATTR, False) else ""


def _build(funcs: dict[str, PrimFunc], target: Target, pipeline: str) -> tvm.runtime.Module:
    address = launcher()
    if address is not None:
        funcs = {**funcs, CONNECT: connect_function()}
    module = IRModule({name: func.with_attr("global_symbol", name) for name, func in funcs.items()})
    library = tvm.tirx.build(module, target, pipeline=pipeline)
    if address is not None:
        library[CONNECT](address)
    return library


def build_kernels(funcs: Sequence[tuple[str, PrimFunc]], target: Target) -> list[Built]:
    """Machine code for PrimFuncs given with names; equal functions share it for as long as somebody holds it."""
    keys = [(str(target), structural_hash(func)) for _, func in funcs]
    with _LOCK:
        held: list[Built | None] = []
        missing: dict[str, tuple[tuple[str, int], PrimFunc]] = {}
        for (name, func), key in zip(funcs, keys, strict=True):
            held.append(_KERNELS.get(key, func))
            pending = any(k == key and structural_equal(func, f) for k, f in missing.values())
            if held[-1] is None and not pending:
                missing[name] = (key, func)
        libraries: dict[tuple[str, str], dict[str, tuple[tuple[str, int], PrimFunc]]] = {}
        for name, (key, func) in missing.items():
            libraries.setdefault(_library_of(name, func), {})[name] = (key, func)
        for (pipeline, alone), chosen in libraries.items():
            raise_deferred()
            library = _build({name: func for name, (_, func) in chosen.items()}, target, pipeline)
            for name, (key, func) in chosen.items():
                built = Built(library[name])
                held.append(built)  # alive until it is looked up below
                if alone:
                    _SHARED.append(built)
                _KERNELS.put(key, func, built)
        return [_KERNELS.get(key, func) for (_, func), key in zip(funcs, keys, strict=True)]
