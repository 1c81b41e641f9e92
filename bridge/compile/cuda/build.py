"""Modules for CUDA: PrimFuncs → one module, host code by LLVM, kernels by NVRTC, kept as bytes.

Modules for CUDA: PrimFuncs → one module, host code by LLVM, kernels by calls of NVRTC on several processors.
A PrimFunc is a host function that launches one kernel or several, one after another: its loops are bound to blocks and
threads, and what it computes outside of them (the launch's integers) reaches the kernels by value. It is called with
tensors, and launches on the stream that torch has current on their device.

TVM's own compilation of CUDA source, which asks for fast math, is not used. The module that it makes from machine code
wants a driver; everything before that does not.

Libraries of kernels for GPUs: made, kept as bytes, and let go where that disturbs nobody: in the thread that builds.
Unloading a module makes the device that it was loaded on the current one of the thread (TVM's destructor does not put
it back). So the last reference to a library is never a user's: it is held here until none of its kernels is in use, and
dropped before the next one is built.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.runtime import Module
from tvm.target import Target
from tvm.tirx import PrimFunc
from tvm.tirx.build import split_host_device_mods

from bridge.base.log import channel
from bridge.base.threads import free_in_children, serves
from bridge.compile.backend import Built
from bridge.compile.codegen.tir import LOOPS_ATTR, lower_loops
from bridge.compile.cuda.nvrtc import compiled, disassembled, made_for
from bridge.compile.cuda.preamble import PREAMBLE
from bridge.compile.runtime.build import REFUSALS, Build, library_bytes, loaded, others_may_build

__all__ = [
    "HOST_TARGET",
    "CudaLibraries",
    "build_executable",
    "build_library",
    "clear_unused",
    "cuda_source",
    "hold",
    "kernel_source",
    "let_go",
    "target_of",
]


HOST_TARGET = {"kind": "llvm", "opt-level": 0}
"""Any processor of the kind, as soon as possible: what launches kernels is no matter of instructions, and there is more
of it than LLVM optimizes while NVRTC compiles what is launched."""

_CALLBACK = "tvm_callback_cuda_compile"
_LINE = "\n// ---- kernels\n"
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(.*?(?=extern "C"|\Z)', re.DOTALL
)

_KERNELS_OF_PART = 2
"""Of one call of NVRTC, at least: each reads the head of the source anew, which takes it as long as a small kernel."""
_MOST_PARTS = 16

FORMS = ("tvmscript", "cuda", "ptx", "sass")


def target_of(arch: str) -> Target:
    """TVM's target of an architecture such as ``"sm_90"``."""
    return Target({"kind": "cuda", "arch": arch}, host=HOST_TARGET)


def build_library(functions: Mapping[str, PrimFunc], arch: str) -> Module:
    """One module of functions; its kernels load where a driver is, on the device of the tensors they are called with.

    Raises:
        RuntimeError: see :func:`bridge.compile.cuda.nvrtc.compiled`.
    """
    target = target_of(arch)
    host, device = _lowered(functions, target)
    parts = _parts(device, target) if len(device.functions) else []
    code = partial(_machine_code, arch=arch)
    with ThreadPoolExecutor(max(1, len(parts)), "bridge-nvrtc", serves) as threads:
        compiling = [_begun(threads, partial(_device_module, part, target, code)) for part in parts]
        library = _host_module(host)
        with others_may_build():
            modules = [finish() for finish in compiling]
    for module in modules:
        library.import_module(module)
    return library


def _begun(threads: ThreadPoolExecutor, work: Callable[[], Module]) -> Callable[[], Module]:
    """What waits for the result of work; does it then, where no thread can be had."""
    try:
        return threads.submit(work).result
    except RuntimeError:
        return work


def build_executable(module: IRModule, arch: str) -> relax.VMExecutable:
    """A Relax module by TVM's default pipeline and schedules: portable rather than quick.

    Raises:
        RuntimeError: see :func:`bridge.compile.cuda.nvrtc.compiled`.
    """
    with _compiling(partial(compiled, arch=arch)):
        return tvm.compile(module, target_of(arch))


def cuda_source(functions: Mapping[str, PrimFunc], arch: str) -> str:
    """All that NVRTC is given for functions: the preamble, then their kernels."""
    target = target_of(arch)
    _, device = _lowered(functions, target)
    return _with_preamble(_source(device, target)) if len(device.functions) else ""


def _source(kernels: IRModule, target: Target) -> str:
    """TVM's CUDA source of kernels."""
    found: list[str] = []

    def keep(source: str) -> bytes:
        found.append(source)
        return b"\0"

    module = _device_module(kernels, target, keep)
    return found[0] if found else str(module.inspect_source())


def _machine_code(source: str, arch: str) -> bytes:
    return compiled(_with_preamble(source), arch)


def _with_preamble(source: str) -> str:
    """TVM's head, which names types, then what kernels call, then the kernels."""
    at = source.find('extern "C"')
    return source[:at] + PREAMBLE + _LINE + source[at:]


def _lowered(functions: Mapping[str, PrimFunc], target: Target) -> tuple[IRModule, IRModule]:
    """Host functions and kernels."""
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    host, device = IRModule({}), IRModule({})
    for loops in (True, False):
        chosen = {name: func for name, func in named.items() if bool(func.attrs.get(LOOPS_ATTR, False)) is loops}
        if not chosen:
            continue
        lower, finish_host, finish_device = lower_loops() if loops else s_tir.pipeline.default_s_tir_pipeline()
        module = lower(tirx.transform.BindTarget(target)(IRModule(chosen)))
        of_host, of_device = split_host_device_mods(module)
        host.update(finish_host()(of_host))
        for kernels in of_device.values():
            device.update(finish_device()(kernels))
    return host, device


def _host_module(module: IRModule) -> Module:
    return tvm.get_global_func("target.build.llvm")(module, Target(HOST_TARGET))


def _device_module(kernels: IRModule, target: Target, compile_source: Callable[[str], bytes]) -> Module:
    """TVM's module of kernels, with machine code by ``compile_source`` where TVM's CUDA run time is loaded.

    Raises:
        RuntimeError: somebody else's compilation took the place of ours.
    """
    with _compiling(compile_source) as ran:
        module = tvm.get_global_func("target.build.cuda")(kernels, target)
    if tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None and not ran:
        raise RuntimeError(f"kernels for {target} were compiled by another {_CALLBACK} than this package's")
    return module


def _parts(kernels: IRModule, target: Target) -> list[IRModule]:
    """Kernels in modules that are compiled at the same time: each call of NVRTC works on one processor.

    They have about equally long sources: the longest come first, each goes where there is the least so far.
    """
    count = min(_MOST_PARTS, _processors(), len(kernels.functions) // _KERNELS_OF_PART)
    if count < 2:
        return [kernels]
    lengths = {match[1]: len(match[0]) for match in _KERNEL.finditer(_source(kernels, target))}
    parts: list[dict[GlobalVar, PrimFunc]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, function in sorted(kernels.functions.items(), key=lambda item: -lengths.get(item[0].name_hint, 0)):
        least = sizes.index(min(sizes))
        sizes[least] += lengths.get(name.name_hint, 0)
        parts[least][name] = function
    return [IRModule(part) for part in parts]


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_BUILDING = threading.local()
_LOCK = threading.Lock()
_REPLACED: list[tvm_ffi.Function] = []


@contextmanager
def _compiling(compile_source: Callable[[str], bytes]) -> Iterator[list[bool]]:
    """This thread's CUDA source goes to a function; yields a list that has an element once that ran."""
    with _LOCK:
        if not _REPLACED:
            _REPLACED.append(tvm.get_global_func(_CALLBACK))
            tvm_ffi.register_global_func(_CALLBACK, _compile, override=True)
    ran: list[bool] = []

    def compile_and_tell(source: str) -> bytes:
        ran.append(True)
        return compile_source(source)

    _BUILDING.compile = compile_and_tell
    try:
        yield ran
    finally:
        del _BUILDING.compile


def _compile(source: str) -> bytes:
    """TVM's callback: ours for modules that this package builds, else the one that was there before."""
    ours = getattr(_BUILDING, "compile", None)
    return _REPLACED[0](source) if ours is None else ours(str(source))


def kernel_source(func: PrimFunc, name: str, arch: str, form: str) -> str:
    """A kernel as text; compiled forms are compiled anew, as :func:`build_library` does.

    Raises:
        ValueError: ``form`` is not one of :data:`FORMS`.
    """
    if form not in FORMS:
        raise ValueError(f"form: wanted one of {', '.join(map(repr, FORMS))}, got {form!r}")
    if form == "tvmscript":
        return func.with_attr("global_symbol", name).script()
    source = cuda_source({name: func}, arch)
    if form == "cuda":
        return source.partition(_LINE)[2]
    return compiled(source, arch, "ptx").decode() if form == "ptx" else disassembled(compiled(source, arch))


_CUDA_RUN_TIME = "ffi.Module.create.cuda"
"""TVM's function that makes a module of machine code for GPUs; missing where there is no driver."""

_LOG = channel("cache")

_HELD: dict[Hashable, weakref.WeakSet[Built]] = {}
_LIBRARIES_LOCK = free_in_children(threading.Lock())


@dataclass(frozen=True)
class CudaLibraries:
    """Libraries of functions for an architecture, a :class:`~bridge.compile.runtime.kernel_store.Libraries`.

    A file of one has the code that launches, for the host, and what NVRTC made, as it was.
    """

    arch: str

    @property
    def key(self) -> tuple[str, ...] | None:
        """The architecture, NVRTC and what it is told, and what the host's code is made for."""
        if tvm.get_global_func(_CUDA_RUN_TIME, allow_missing=True) is None:
            return None
        return self.arch, str(HOST_TARGET), *made_for()

    def build(self, functions: Mapping[str, PrimFunc], loops: bool) -> Module:
        let_go()
        return build_library(functions, self.arch)

    def build_bytes(self, functions: Mapping[str, PrimFunc], loops: bool) -> tuple[Module, bytes | None]:
        """The library as another process will load it."""
        library = self.build(functions, loops)
        try:
            content = library_bytes(library)
            return self.load(content), content
        except REFUSALS as error:
            _LOG.info("kernels are not kept: %s", error)
            return library, None

    def load(self, content: bytes) -> Module:
        return loaded(content)


def hold(kernels: Iterable[Built]) -> None:
    """Keeps the libraries that kernels are in for as long as those are in use, and until :func:`let_go`."""
    with _LIBRARIES_LOCK:
        for kernel in kernels:
            if kernel.build is not None:
                _HELD.setdefault(kernel.build, weakref.WeakSet()).add(kernel)


def let_go() -> None:
    """Drops the libraries of which no kernel is in use; only in a thread whose current device is nobody's concern."""
    with _LIBRARIES_LOCK:
        unused = [build for build, kernels in _HELD.items() if not kernels]
        for build in unused:
            del _HELD[build]
    del unused  # the last references: not while the lock is held


def clear_unused() -> None:
    """:func:`let_go`, from any thread, if there is something to drop."""
    with _LIBRARIES_LOCK:
        is_any = not all(_HELD.values())
    if is_any:
        Build(let_go)
