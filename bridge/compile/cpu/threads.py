"""Thread pool: compiled kernels launch their parallel loops on torch's own OpenMP threads.

TVM would start a pool of its own, whose workers spin for a while after every kernel, as torch's do after every product:
on a machine that both fill, they steal each other's processors. A compiled module calls the pool through a pointer
(``TVMBackendParallelLaunch``: ``lambda(task, environment, data)`` once per thread), so a few lines of LLVM that pass
the same call to ``GOMP_parallel`` are enough; the number of threads is that of ``torch.set_num_threads`` at the call.
Both GNU's and LLVM's OpenMP have that entry; in a torch without OpenMP, TVM's pool stays.

If a launch's sizes decide whether threads pay, the kernel sets the calling thread's number of threads to one while its
loop runs: a team of one is the caller.

Step driver: the launches of a loop's steps, as addresses in memory → run one after the other, without Python. Python
takes as long to launch a small kernel as the kernel runs. Only the tensors' addresses differ from step to step, by a
rule: a few lines of LLVM set each step's addresses and call the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import StringImm
from tvm.tirx import BufferLoad, BufferStore, Evaluate, PrimFunc, SeqStmt, Stmt
from tvm_ffi import libinfo

from bridge.base.log import channel
from bridge.base.threads import serves
from bridge.compile.codegen.emit import stack_buffer
from bridge.compile.codegen.tir import LaunchArguments
from bridge.compile.loop_ir.operations import Argument
from bridge.compile.runtime.loop_frame import Drive

__all__ = ["CONNECT", "connect_function", "end_team", "if_profitable", "in_a_plain_thread", "launcher", "module_of"]
__all__ += ["step_driver"]

_LOG = channel("compile")

_OPENMP = ("GOMP_parallel", "omp_get_max_threads", "omp_get_num_threads", "omp_get_thread_num", "omp_set_num_threads")
"""OpenMP functions that the launcher and :func:`if_profitable` call."""

_SOFT = 1
"""OpenMP's ``omp_pause_soft``."""

CONNECT = "bridge_connect_threads"
"""Name of the function, in every module of kernels, that takes the launcher's address."""

_LAUNCHER = """
%environment = type { ptr, i32 }  ; TVMParallelGroupEnv: synchronization, number of tasks
%work = type { ptr, ptr, i32 }  ; lambda, its data, status of a task that failed

declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_max_threads()
declare i32 @omp_get_num_threads()
declare i32 @omp_get_thread_num()

define internal void @run_task(ptr %work) {
  %environment = alloca %environment
  %count = call i32 @omp_get_num_threads()
  %task = call i32 @omp_get_thread_num()
  store ptr null, ptr %environment
  %count.at = getelementptr %environment, ptr %environment, i32 0, i32 1
  store i32 %count, ptr %count.at
  %lambda = load ptr, ptr %work
  %data.at = getelementptr %work, ptr %work, i32 0, i32 1
  %data = load ptr, ptr %data.at
  %status = call i32 %lambda(i32 %task, ptr %environment, ptr %data)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %report, label %end
report:
  %status.at = getelementptr %work, ptr %work, i32 0, i32 2
  store atomic i32 %status, ptr %status.at monotonic, align 4
  br label %end
end:
  ret void
}

define internal i32 @launch(ptr %lambda, ptr %data, i32 %tasks) {
  %work = alloca %work
  %environment = alloca %environment
  %most = call i32 @omp_get_max_threads()
  %single = icmp eq i32 %most, 1
  %asked = icmp eq i32 %tasks, 0
  %alone = and i1 %single, %asked
  br i1 %alone, label %call, label %team
call:  ; what a team of one does, without making one
  store ptr null, ptr %environment
  %count.at = getelementptr %environment, ptr %environment, i32 0, i32 1
  store i32 1, ptr %count.at
  %returned = call i32 %lambda(i32 0, ptr %environment, ptr %data)
  ret i32 %returned
team:
  store ptr %lambda, ptr %work
  %data.at = getelementptr %work, ptr %work, i32 0, i32 1
  store ptr %data, ptr %data.at
  %status.at = getelementptr %work, ptr %work, i32 0, i32 2
  store i32 0, ptr %status.at
  ; 0 tasks, which is what compiled loops ask for: as many as the calling thread's setting says
  call void @GOMP_parallel(ptr @run_task, ptr %work, i32 %tasks, i32 0)
  %status = load i32, ptr %status.at
  ret i32 %status
}

define i32 @__tvm_ffi_launcher(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  store i32 1, ptr %result  ; kTVMFFIInt
  %value = getelementptr i8, ptr %result, i64 8
  store i64 ptrtoint (ptr @launch to i64), ptr %value
  ret i32 0
}
"""

_CONNECT = """
@__TVMBackendParallelLaunch = external global ptr

define i32 @bridge_set_launcher(i64 %address) {
  %launcher = inttoptr i64 %address to ptr
  store ptr %launcher, ptr @__TVMBackendParallelLaunch
  ret i32 0
}
"""


@functools.cache
def _launcher_module() -> tvm.runtime.Module | None:
    symbols = ctypes.CDLL(None)
    if not all(hasattr(symbols, name) for name in _OPENMP):
        _LOG.info("torch's process has no OpenMP run time with GOMP_parallel: kernels run on TVM's own threads")
        return None
    return module_of(_LAUNCHER, "threads")


def module_of(functions: str, name: str) -> tvm.runtime.Module | None:
    """Builds LLVM functions from text; ``None`` if no file can be written."""
    # An empty module's text starts with the data layout and target that the loader requires.
    head = tvm.get_global_func("codegen.LLVMModuleCreate")("llvm", name).inspect_source("ll")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.ll"
        try:
            path.write_text(head + functions)
        except OSError as error:  # a full disk
            _LOG.warning("%s: TVM's own way, or Python's: %s", name, error)
            return None
        return tvm.runtime.load_module(str(path))


def launcher() -> int | None:
    """Address of an ``int(lambda, data, tasks)`` that runs on torch's threads; ``None`` without OpenMP.

    Valid for the process's lifetime. The number of threads is the calling thread's, which torch sets at its first use.
    """
    module = _launcher_module()
    if module is None:
        return None
    torch.get_num_threads()
    return module["launcher"]()


_FORKED: list[bool] = []
"""Non-empty in a process that was forked from another one with this module."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(True))


def end_team() -> None:
    """Ends the calling thread's OpenMP threads; its next parallel region starts others, in a tenth of a millisecond.

    GNU's run time lets threads wait awake for the next region only if there are no more of them than processors: two
    teams would sleep, and a small product take ten times as long. Other threads' teams are left alone. Does nothing in
    a forked process, which has none of the threads that its run time remembers and would wait for them, or if torch
    runs on one thread, as it must in a fork.
    """
    if _FORKED or torch.get_num_threads() == 1:
        return
    symbols = ctypes.CDLL(None)
    if hasattr(symbols, "omp_pause_resource_all") and not hasattr(symbols, "__kmpc_fork_call"):
        symbols.omp_pause_resource_all(_SOFT)


def connect_function() -> PrimFunc:
    """``CONNECT(address: int64)``: from then on, this function's module launches through ``address``."""
    address = tirx.Var("address", "int64")
    store = tirx.Evaluate(tirx.call_extern("int32", "bridge_set_launcher", address))
    body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", StringImm(_CONNECT), store)
    return PrimFunc([address], body).with_attr({"tirx.noalias": True, "tirx.is_scheduled": True})


def if_profitable(number: LaunchArguments, worth: bool | Argument, loop: Stmt) -> Stmt:
    """A parallel loop that the calling thread runs alone if the launch's argument is 0."""
    if isinstance(worth, bool) or launcher() is None:
        return loop
    zero = tirx.const(0, "int32")
    cell, allocation = stack_buffer(1, "int32", "threads")
    before = BufferLoad(cell, [zero])
    alone = tirx.EQ(number(worth), tirx.const(0, number.index_type))
    return SeqStmt(
        [
            allocation,
            BufferStore(cell, tirx.call_extern("int32", "omp_get_max_threads"), [zero]),
            _set_threads(tirx.Select(alone, tirx.const(1, "int32"), before)),
            loop,
            _set_threads(before),
        ]
    )


def _set_threads(count: tirx.Expr) -> Stmt:
    return Evaluate(tirx.call_extern("void", "omp_set_num_threads", count))


_DRIVER = """
%value = type { i32, i32, i64 }  ; TVMFFIAny
%call = type { ptr, ptr, i64 }  ; function, its arguments, their number
%place = type { ptr, i64, i64, i64, i64 }  ; where an address stands, of this step, the next two, what two steps add

define i32 @__tvm_ffi_drive(ptr %self, ptr %arguments, i32 %count, ptr %result) {
entry:
  %steps.at = getelementptr %value, ptr %arguments, i64 0, i32 2
  %steps = load i64, ptr %steps.at
  %calls.at = getelementptr %value, ptr %arguments, i64 1, i32 2
  %calls = load ptr, ptr %calls.at
  %number.at = getelementptr %value, ptr %arguments, i64 2, i32 2
  %number = load i64, ptr %number.at
  %places.at = getelementptr %value, ptr %arguments, i64 3, i32 2
  %places = load ptr, ptr %places.at
  %moving.at = getelementptr %value, ptr %arguments, i64 4, i32 2
  %moving = load i64, ptr %moving.at
  %invoke.at = getelementptr %value, ptr %arguments, i64 5, i32 2
  %invoke = load ptr, ptr %invoke.at
  %returned = alloca %value
  br label %step
step:
  %t = phi i64 [ 0, %entry ], [ %t.next, %launched ]
  %more = icmp slt i64 %t, %steps
  br i1 %more, label %place, label %done
place:
  %p = phi i64 [ 0, %step ], [ %p.next, %put ]
  %unplaced = icmp slt i64 %p, %moving
  br i1 %unplaced, label %put, label %launch
put:
  %where.at = getelementptr %place, ptr %places, i64 %p, i32 0
  %where = load ptr, ptr %where.at
  %now.at = getelementptr %place, ptr %places, i64 %p, i32 1
  %now = load i64, ptr %now.at
  store i64 %now, ptr %where
  %next.at = getelementptr %place, ptr %places, i64 %p, i32 2
  %next = load i64, ptr %next.at
  store i64 %next, ptr %now.at
  %later.at = getelementptr %place, ptr %places, i64 %p, i32 3
  %later = load i64, ptr %later.at
  store i64 %later, ptr %next.at
  %added.at = getelementptr %place, ptr %places, i64 %p, i32 4
  %added = load i64, ptr %added.at
  %latest = add i64 %next, %added
  store i64 %latest, ptr %later.at
  %p.next = add i64 %p, 1
  br label %place
launch:
  %c = phi i64 [ 0, %place ], [ %c.next, %good ]
  %unlaunched = icmp slt i64 %c, %number
  br i1 %unlaunched, label %one, label %launched
one:
  %function.at = getelementptr %call, ptr %calls, i64 %c, i32 0
  %function = load ptr, ptr %function.at
  %given.at = getelementptr %call, ptr %calls, i64 %c, i32 1
  %given = load ptr, ptr %given.at
  %length.at = getelementptr %call, ptr %calls, i64 %c, i32 2
  %length = load i64, ptr %length.at
  %short = trunc i64 %length to i32
  store %value zeroinitializer, ptr %returned
  %status = call i32 %invoke(ptr %function, ptr %given, i32 %short, ptr %returned)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %bad, label %good
good:
  %c.next = add i64 %c, 1
  br label %launch
launched:
  %t.next = add i64 %t, 1
  br label %step
bad:
  ret i32 %status
done:
  store %value zeroinitializer, ptr %result
  ret i32 0
}
"""


@functools.cache
def step_driver() -> Drive | None:
    """The driver of loops' steps; ``None`` if TVM's functions cannot be called by address."""
    if not hasattr(tvm_ffi.Function, "__chandle__"):
        _LOG.info("this TVM does not tell the addresses of functions: steps of loops are launched by Python")
        return None
    module = module_of(_DRIVER, "steps")
    if module is None:
        return None
    drive = module["drive"]
    invoke = ctypes.cast(ctypes.CDLL(libinfo.find_libtvm_ffi()).TVMFFIFunctionCall, ctypes.c_void_p).value

    def run(steps: int, calls: int, launches: int, places: int, moving: int) -> None:
        drive(steps, calls, launches, places, moving, invoke)

    return run


Result = TypeVar("Result")


def in_a_plain_thread(function: Callable[[], Result]) -> Result:
    """The function's result, from a thread of its own.

    Grad mode, autocast, inference mode, fake tensors' and other dispatch modes, ``torch.func`` transforms and the
    default device are per thread: the caller's are not active there, and the function cannot change them. The caller's
    OpenMP threads end first: otherwise both teams would sleep between parallel regions.
    """

    def run() -> Result:
        torch.get_num_threads()  # torch's thread setting reaches a new thread's OpenMP at torch's first use there
        with torch.no_grad():
            return function()

    end_team()
    with ThreadPoolExecutor(1, "bridge-measure", serves) as pool:
        return pool.submit(run).result()
