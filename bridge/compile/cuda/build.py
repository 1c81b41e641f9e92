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

Launch shapes: a kernel's function and a launch's integers → blocks, threads and bytes of shared memory.

Launch shapes: a kernel's function and a launch's integers → how many blocks of how many threads, as text.
For people; the shapes are the function's own, evaluated as its host code does.

Shared memory of a row kernel: its arrays, of each element type → bytes; how many groups of threads these allow.
Two things lie there: what the warps of a group have of a row's reductions, an array for each that a pass completes
(:class:`bridge.compile.cuda.columns.Team`), and what the groups have of column reductions, an array for each element
type (:class:`bridge.compile.cuda.row.TaskPartials`). Together they are no more than :data:`SHARED_BYTES`: with
fewer groups, a block has less of both.
"""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import tvm
import tvm_ffi
from tvm import relax, s_tir, sym, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.ir.expr import TensorLoad
from tvm.runtime import Module
from tvm.target import Target
from tvm.tirx import AttrStmt, Bind, Cast, Expr, For, IfThenElse, IntImm, PrimFunc, Stmt
from tvm.tirx.build import split_host_device_mods

from autodiff.ir import itemsize
from bridge.base.log import channel
from bridge.base.threads import free_in_children, serves
from bridge.compile.backend import Built
from bridge.compile.codegen.emit import compute_type
from bridge.compile.codegen.tir import LOOPS_ATTR, lower_loops
from bridge.compile.cuda.emitter import PREAMBLE
from bridge.compile.cuda.limits import SHARED_BYTES, WARP
from bridge.compile.cuda.nvrtc import compiled, disassembled, made_for
from bridge.compile.runtime.build import REFUSALS, Build, library_bytes, loaded, others_may_build
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["HOST_TARGET", "CudaLibraries", "build_executable", "build_library", "clear_unused", "cuda_source"]
__all__ += ["fitting_groups", "hold", "kernel_source", "launch_shapes", "let_go", "target_of", "turns_together"]

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


_INSIDE = ("body", "then_case", "else_case", "block")
"""Where statements hold others."""


def launch_shapes(function: PrimFunc, scalars: Sequence[int]) -> tuple[str, ...]:
    """Of each launch in order, as in ``"96 x 256 threads"``; none for one that has no blocks.

    A number that is not the launch's is written as the kernel has it.
    """
    analyzer = sym.Analyzer()
    for stmt in _statements(function.body):
        if isinstance(stmt, Bind) and (read := _read(stmt.value)) is not None:
            analyzer.bind(stmt.var, tirx.const(scalars[int(read.indices[0])], str(stmt.var.ty)))
    found = []
    for launch in _launches(function.body, analyzer):
        extents = dict(filter(None, map(_extent, _statements(launch))))
        sizes = {tag: analyzer.simplify(extent) for tag, extent in extents.items()}
        if not all(isinstance(size, IntImm) for size in sizes.values()):
            found.append(" x ".join(map(str, extents.values())))
            continue
        blocks, threads = (
            math.prod(int(size) for tag, size in sizes.items() if tag.startswith(of)) for of in ("block", "thread")
        )
        if blocks:
            found.append(f"{blocks} x {threads} threads")
    return tuple(found)


def _read(value: Expr) -> TensorLoad | None:
    """A read of the descriptor."""
    read = value.value if isinstance(value, Cast) else value
    return read if isinstance(read, TensorLoad) and getattr(read.source, "name", "") == "descriptor" else None


def _extent(stmt: Stmt) -> tuple[str, Expr] | None:
    """What a statement is bound to, and how many there are of it."""
    if isinstance(stmt, AttrStmt) and stmt.attr_key == "thread_extent":
        return str(stmt.node.thread_tag), stmt.value
    if isinstance(stmt, For) and stmt.thread_binding is not None:
        return str(stmt.thread_binding.thread_tag), stmt.extent
    return None


def _launches(stmt: Stmt, analyzer: sym.Analyzer) -> Iterator[Stmt]:
    """The outermost statements that are bound to blocks or threads, in order; of two forms the one that is taken."""
    if _extent(stmt) is not None:
        yield stmt
        return
    condition = analyzer.simplify(stmt.condition) if isinstance(stmt, IfThenElse) else None
    left_out = None
    if isinstance(condition, IntImm):
        left_out = stmt.else_case if int(condition) else stmt.then_case
    for inner in _inner(stmt):
        if inner is not left_out:
            yield from _launches(inner, analyzer)


def _statements(stmt: Stmt) -> Iterator[Stmt]:
    """A statement and all inside."""
    yield stmt
    for inner in _inner(stmt):
        yield from _statements(inner)


def _inner(stmt: Stmt) -> Iterator[Stmt]:
    yield from getattr(stmt, "seq", ())
    for name in _INSIDE:
        inner = getattr(stmt, name, None)
        if isinstance(inner, Stmt):
            yield inner


_PARTS_BYTES = 32_768
"""In which the groups put together what they have of column reductions, where one turn does not need more."""

_ALIGNED = 64
"""An array begins at a multiple of so many bytes."""


def fitting_groups(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """``groups`` of ``threads``, or as many fewer as shared memory has room for: a power of two."""
    while groups > 1 and _exchanged(plan, threads) + _turn(plan, threads, groups, lanes) > SHARED_BYTES:
        groups //= 2
    return groups


def turns_together(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """Of how many turns the groups' parts of all column reductions have room at once."""
    room = min(_PARTS_BYTES, SHARED_BYTES - _exchanged(plan, threads))
    return max(1, room // _turn(plan, threads, groups, lanes))


def _exchanged(plan: RowPlan, threads: int) -> int:
    """Bytes for the warps' values: those of one pass make room for those of the next."""
    if threads <= WARP:
        return 0
    arrays = set()
    for row_pass in plan.passes:
        rows = [plan.nodes[node] for node in row_pass.reductions if plan.nodes[node].reduces == "row"]
        arrays |= {(index, compute_type(node.dtype)) for index, node in enumerate(rows)}
    return sum(_array(WARP, dtype) for _, dtype in arrays)


def _turn(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """Bytes for the groups' parts of one turn, of each element type; one group stores them as they are."""
    if groups == 1:
        return 1
    dtypes = {compute_type(plan.nodes[node].dtype) for node in plan.column_reductions}
    return max(1, sum(_array(threads * groups * lanes, dtype) for dtype in dtypes))


def _array(elements: int, dtype: str) -> int:
    return -(-elements * itemsize(dtype) // _ALIGNED) * _ALIGNED
