"""Modules for CUDA: PrimFuncs → one module; host code by LLVM, kernels by NVRTC on several processors, kept as bytes.

A PrimFunc is a host function that launches one or more kernels in order: its loops are bound to blocks and threads, and
the values that it computes outside of them (the launch's integers) are passed to the kernels. It is called with
tensors, and launches on torch's current stream of their device. TVM's own compilation of CUDA source, which asks for
fast math, is not used. Only the module that TVM makes of the machine code needs a driver.

Libraries of kernels for GPUs are built, kept as bytes, and dropped only in the building thread: unloading a module
changes the thread's current device to the module's (TVM's destructor does not restore it). So no user holds the last
reference to a library: it is held here until none of its kernels is in use, and dropped before the next build.

Launch shapes: a kernel's function and a launch's integers → numbers of blocks and threads, as text for display,
evaluated from the function as its host code does.

Shared memory of a row kernel: its arrays, of each element type → bytes, and the number of groups of threads that fit.
It contains the warps' partials of a row's reductions, an array for each reduction of a pass
(:class:`bridge.compile.cuda.columns.Team`), and the groups' partials of column reductions, an array per element type
(:class:`bridge.compile.cuda.row.TaskPartials`), at most :data:`SHARED_BYTES` in sum: fewer groups need less of both.
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
from tvm import relax, sym, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.ir.expr import TensorLoad
from tvm.runtime import Module
from tvm.target import Target
from tvm.tirx import AttrStmt, Bind, Cast, Expr, For, IfThenElse, IntImm, PrimFunc, Stmt
from tvm.tirx.build import split_host_device_mods

from autodiff.ir import compute_type, itemsize
from bridge.base.log import channel
from bridge.base.threads import free_in_children, serves
from bridge.compile.backend import Built
from bridge.compile.codegen.tir import lower_loops
from bridge.compile.cuda.emitter import PREAMBLE
from bridge.compile.cuda.limits import SHARED_BYTES, WARP
from bridge.compile.cuda.nvrtc import compiled, disassembled, made_for
from bridge.compile.runtime.build import REFUSALS, Build, library_bytes, loaded, others_may_build
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["HOST_TARGET", "CudaLibraries", "build_executable", "build_library", "clear_unused", "cuda_source"]
__all__ += ["fitting_groups", "hold", "kernel_source", "launch_shapes", "let_go", "target_of", "turns_together"]

HOST_TARGET = {"kind": "llvm", "opt-level": 0}
"""Unoptimized code for any processor of the host's kind: launching needs no speed, and optimizing this much host code
would take longer than NVRTC takes for the kernels."""

_CALLBACK = "tvm_callback_cuda_compile"
_LINE = "\n// ---- kernels\n"
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(.*?(?=extern "C"|\Z)', re.DOTALL
)

_KERNELS_OF_PART = 2
"""Minimum per call of NVRTC: each call parses the source's head again, which takes as long as a small kernel."""
_MOST_PARTS = 16

FORMS = ("tvmscript", "cuda", "ptx", "sass")


def target_of(arch: str) -> Target:
    """TVM's target of an architecture such as ``"sm_90"``."""
    return Target({"kind": "cuda", "arch": arch}, host=HOST_TARGET)


def build_library(functions: Mapping[str, PrimFunc], arch: str) -> Module:
    """One module of functions; its kernels load at the first call, on the tensors' device, if there is a driver.

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
    """Starts work in a thread; returns a function that waits for the result, or, without a thread, does the work."""
    try:
        return threads.submit(work).result
    except RuntimeError:
        return work


def build_executable(module: IRModule, arch: str) -> relax.VMExecutable:
    """A Relax module by TVM's default pipeline and schedules: portable rather than fast.

    Raises:
        RuntimeError: see :func:`bridge.compile.cuda.nvrtc.compiled`.
    """
    with _compiling(partial(compiled, arch=arch)):
        return tvm.compile(module, target_of(arch))


def cuda_source(functions: Mapping[str, PrimFunc], arch: str) -> str:
    """NVRTC's input for functions: TVM's head, the preamble, the kernels."""
    target = target_of(arch)
    _, device = _lowered(functions, target)
    return _with_preamble(_source(device, target)) if len(device.functions) else ""


def _source(kernels: IRModule, target: Target) -> str:
    found: list[str] = []

    def keep(source: str) -> bytes:
        found.append(source)
        return b"\0"

    module = _device_module(kernels, target, keep)
    return found[0] if found else str(module.inspect_source())


def _machine_code(source: str, arch: str) -> bytes:
    return compiled(_with_preamble(source), arch)


def _with_preamble(source: str) -> str:
    """Inserts the preamble, functions that kernels call, between the head of TVM's source and the kernels."""
    at = source.find('extern "C"')
    return source[:at] + PREAMBLE + _LINE + source[at:]


def _lowered(functions: Mapping[str, PrimFunc], target: Target) -> tuple[IRModule, IRModule]:
    """Splits functions into host functions and kernels, both lowered."""
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    lower, finish_host, finish_device = lower_loops()
    host, of_device = split_host_device_mods(lower(tirx.transform.BindTarget(target)(IRModule(named))))
    device = IRModule({})
    for kernels in of_device.values():
        device.update(finish_device()(kernels))
    return finish_host()(host), device


def _host_module(module: IRModule) -> Module:
    return tvm.get_global_func("target.build.llvm")(module, Target(HOST_TARGET))


def _device_module(kernels: IRModule, target: Target, compile_source: Callable[[str], bytes]) -> Module:
    """TVM's module of kernels, with machine code by ``compile_source`` if TVM's CUDA run time is loaded.

    Raises:
        RuntimeError: another registered callback compiled the source.
    """
    with _compiling(compile_source) as ran:
        module = tvm.get_global_func("target.build.cuda")(kernels, target)
    if tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None and not ran:
        raise RuntimeError(f"kernels for {target} were compiled by another {_CALLBACK} than this package's")
    return module


def _parts(kernels: IRModule, target: Target) -> list[IRModule]:
    """Kernels in modules that are compiled in parallel: each call of NVRTC works on one processor.

    The sources are about equally long: the longest kernels go first, each to the shortest module so far.
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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_BUILDING = threading.local()
_LOCK = threading.Lock()
_REPLACED: list[tvm_ffi.Function] = []


@contextmanager
def _compiling(compile_source: Callable[[str], bytes]) -> Iterator[list[bool]]:
    """Redirects this thread's CUDA source to a function; yields a list that is non-empty once it ran."""
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
    """TVM's callback: this package's function for its own modules, else the previously registered one."""
    ours = getattr(_BUILDING, "compile", None)
    return _REPLACED[0](source) if ours is None else ours(str(source))


def kernel_source(func: PrimFunc, name: str, arch: str, form: str) -> str:
    """A kernel as text; compiled forms are compiled anew, as by :func:`build_library`.

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
"""TVM's function that makes a module of machine code for GPUs; missing without a driver."""

_LOG = channel("cache")

_HELD: dict[Hashable, weakref.WeakSet[Built]] = {}
_LIBRARIES_LOCK = free_in_children(threading.Lock())


@dataclass(frozen=True)
class CudaLibraries:
    """Libraries of functions for an architecture, a :class:`~bridge.compile.runtime.kernel_store.Libraries`.

    A library's file has the launching code, for the host, and NVRTC's output unchanged.
    """

    arch: str

    @property
    def key(self) -> tuple[str, ...] | None:
        """The architecture, the host's target, NVRTC's version and options; ``None`` without TVM's CUDA run time."""
        if tvm.get_global_func(_CUDA_RUN_TIME, allow_missing=True) is None:
            return None
        return self.arch, str(HOST_TARGET), *made_for()

    def build(self, functions: Mapping[str, PrimFunc]) -> Module:
        let_go()
        return build_library(functions, self.arch)

    def build_bytes(self, functions: Mapping[str, PrimFunc]) -> tuple[Module, bytes | None]:
        """The library as another process would load it."""
        library = self.build(functions)
        try:
            content = library_bytes(library)
            return self.load(content), content
        except REFUSALS as error:
            _LOG.info("kernels are not kept: %s", error)
            return library, None

    def load(self, content: bytes) -> Module:
        return loaded(content)


def hold(kernels: Iterable[Built]) -> None:
    """Keeps the libraries of kernels while the kernels are in use, and until :func:`let_go`."""
    with _LIBRARIES_LOCK:
        for kernel in kernels:
            if kernel.build is not None:
                _HELD.setdefault(kernel.build, weakref.WeakSet()).add(kernel)


def let_go() -> None:
    """Drops the libraries without kernels in use; only in a thread whose current device does not matter."""
    with _LIBRARIES_LOCK:
        unused = [build for build, kernels in _HELD.items() if not kernels]
        for build in unused:
            del _HELD[build]
    del unused  # drops the last references, after the lock is released


def clear_unused() -> None:
    """:func:`let_go` in a build thread, if there is something to drop."""
    with _LIBRARIES_LOCK:
        is_any = not all(_HELD.values())
    if is_any:
        Build(let_go)


_INSIDE = ("body", "then_case", "else_case", "block")
"""Fields of statements that contain statements."""


def launch_shapes(function: PrimFunc, scalars: Sequence[int]) -> tuple[str, ...]:
    """For each launch in order, text like ``"96 x 256 threads"``; none for a kernel without blocks.

    A number that does not follow from the launch's integers is written as an expression.
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
    """The thread tag that a statement is bound to, and its extent; ``None`` for other statements."""
    if isinstance(stmt, AttrStmt) and stmt.attr_key == "thread_extent":
        return str(stmt.node.thread_tag), stmt.value
    if isinstance(stmt, For) and stmt.thread_binding is not None:
        return str(stmt.thread_binding.thread_tag), stmt.extent
    return None


def _launches(stmt: Stmt, analyzer: sym.Analyzer) -> Iterator[Stmt]:
    """The outermost statements that are bound to blocks or threads, in order; only taken branches where known."""
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
"""Bytes for the groups' partials of column reductions, unless one turn needs more."""

_ALIGNED = 64
"""Alignment of an array, in bytes."""


def fitting_groups(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """``groups`` of ``threads``, or as many fewer as fit in shared memory: a power of two."""
    while groups > 1 and _exchanged(plan, threads) + _turn(plan, threads, groups, lanes) > SHARED_BYTES:
        groups //= 2
    return groups


def turns_together(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """The number of turns whose partials of all column reductions fit in shared memory at once."""
    room = min(_PARTS_BYTES, SHARED_BYTES - _exchanged(plan, threads))
    return max(1, room // _turn(plan, threads, groups, lanes))


def _exchanged(plan: RowPlan, threads: int) -> int:
    """Bytes for the warps' partials; each pass reuses them."""
    if threads <= WARP:
        return 0
    arrays = set()
    for row_pass in plan.passes:
        rows = [plan.nodes[node] for node in row_pass.reductions if plan.nodes[node].reduces == "row"]
        arrays |= {(index, compute_type(node.dtype)) for index, node in enumerate(rows)}
    return sum(_array(WARP, dtype) for _, dtype in arrays)


def _turn(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """Bytes for the groups' partials of one turn, of all element types; a single group stores its own directly."""
    if groups == 1:
        return 1
    dtypes = {compute_type(plan.nodes[node].dtype) for node in plan.column_reductions}
    return max(1, sum(_array(threads * groups * lanes, dtype) for dtype in dtypes))


def _array(elements: int, dtype: str) -> int:
    return -(-elements * itemsize(dtype) // _ALIGNED) * _ALIGNED
