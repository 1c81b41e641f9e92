"""Modules for CUDA: functions bound to threads → CUDA C → machine code, all without a GPU."""

from __future__ import annotations

import gc
import re
import threading

import pytest
import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx import AttrStmt, BufferLoad, BufferStore, Expr, IfThenElse, PrimFunc, Stmt, Var

from bridge.base.session import SESSION
from bridge.compile import Built
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer, loop_function, sequence
from bridge.compile.cuda import build, nvrtc
from bridge.compile.cuda.build import build_library, cuda_source, hold, kernel_source, let_go
from bridge.compile.cuda.nvrtc import disassembler
from bridge.compile.loop_ir.operations import Argument
from bridge.compile.runtime.build import Build
from tests.nvrtc import ARCHES, needs_nvrtc, without_gpu

pytestmark = needs_nvrtc

THREADS = 128
CALLBACK = "tvm_callback_cuda_compile"


def bound(tag: str, extent: Expr, body) -> Stmt:
    variable = Var(tag.replace(".", "_"), "int32")
    axis = tirx.IterVar(tvm.ir.Range(0, extent), variable, tirx.IterVar.ThreadIndex, tag)
    return AttrStmt(axis, "thread_extent", extent, body(variable))


def launches(factor: float) -> PrimFunc:
    """``out = sqrt(x * factor + y) / y`` in two launches, of ``n`` elements."""
    number = LaunchArguments(1, "int32")
    x, y, out, scratch = (flat_buffer("float32", name, "int32") for name in ("in0", "in1", "out0", "partial0"))
    count = number(Argument(0))

    def each(store) -> Stmt:
        def thread(block: Expr):
            def element(index: Expr) -> Stmt:
                at = block * tirx.const(THREADS, "int32") + index
                return IfThenElse(at < count, store(at), None)

            return bound("threadIdx.x", tirx.const(THREADS, "int32"), element)

        blocks = tirx.truncdiv(count + tirx.const(THREADS - 1, "int32"), tirx.const(THREADS, "int32"))
        return bound("blockIdx.x", blocks, thread)

    def add(at: Expr) -> Stmt:
        product = BufferLoad(x, [at]) * tirx.const(factor, "float32")
        return BufferStore(scratch, product + BufferLoad(y, [at]), [at])

    def divide(at: Expr) -> Stmt:
        root = tirx.call_pure_extern("float32", "sqrtf", BufferLoad(scratch, [at]))
        return BufferStore(out, root / BufferLoad(y, [at]), [at])

    body = sequence([*number.stmts, each(add), each(divide)])
    return loop_function([x, y, out, scratch, *number.params], body)


@pytest.mark.parametrize("arch", ARCHES)
def test_all_kernels_are_compiled_in_one_call(arch, monkeypatch):
    calls = []
    monkeypatch.setattr(nvrtc, "_compile", lambda *given, real=nvrtc._compile: calls.append(given) or real(*given))
    source = cuda_source({"k0": launches(2.0), "k1": launches(3.0)}, arch)
    cubin = nvrtc.compiled(source, arch)
    assert cubin.startswith(b"\x7fELF") and nvrtc.compiled(source, arch) is cubin and len(calls) == 1
    for kernel in ("k0_kernel", "k0_kernel_1", "k1_kernel", "k1_kernel_1"):
        assert kernel.encode() + b"\0" in cubin
    SESSION.reset("programs")
    assert nvrtc.compiled(source, arch) == cubin and len(calls) == 2


def kernels_of(module) -> list[set[str]]:
    return [set(re.findall(r"void (?:__launch_bounds__\(\d+\) )?(\w+)\(", part.inspect_source())) for part in module]


@without_gpu
@pytest.mark.parametrize("has_threads", [True, False])
def test_kernels_are_compiled_in_parts(has_threads, monkeypatch):
    """Of about equal size, one a processor; each kernel is in one. Where no thread can be had, one after another."""

    def none_left(*work):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(build, "_processors", lambda: 3)
    if not has_threads:
        monkeypatch.setattr(build.ThreadPoolExecutor, "submit", none_left)
    library = build_library({f"k{index}": launches(float(index)) for index in range(6)}, "sm_90")
    parts = kernels_of(library.imports)
    assert sorted(map(len, parts)) == [4, 4, 4] and len(set().union(*parts)) == 12


def test_arithmetic_is_ieees():
    """One rounding per operation: no contraction, correct division and root, nothing flushed."""
    ptx = kernel_source(launches(2.5), "k", "sm_90", "ptx")
    assert all(each in ptx for each in ("mul.rn.f32", "add.rn.f32", "sqrt.rn.f32", "div.rn.f32"))
    assert not any(each in ptx for each in ("fma", ".ftz", ".approx"))


def test_sources_by_form():
    assert "launch_thread" in kernel_source(launches(2.0), "k", "sm_90", "tvmscript")
    assert kernel_source(launches(2.0), "k", "sm_90", "cuda").startswith('extern "C" __global__')
    with pytest.raises(ValueError, match="form: wanted one of 'tvmscript', 'cuda', 'ptx', 'sass', got 'asm'"):
        kernel_source(launches(2.0), "k", "sm_90", "asm")
    if disassembler():
        assert "FADD" in kernel_source(launches(2.0), "k", "sm_90", "sass")
    else:
        with pytest.raises(RuntimeError, match="SASS wants one of nvdisasm and cuobjdump"):
            kernel_source(launches(2.0), "k", "sm_90", "sass")


def test_what_nvrtc_refuses_is_named_with_its_line():
    with pytest.raises(RuntimeError, match=r"for sm_90:\n.*\"nothing\" is undefined\n.*x = nothing;"):
        nvrtc.compiled('extern "C" __global__ void k(float* x) {\n  *x = nothing;\n}', "sm_90")
    with pytest.raises(RuntimeError, match="sm_1"):
        nvrtc.compiled('extern "C" __global__ void k() {}', "sm_1")


@without_gpu
def test_a_library_is_made_without_a_driver_and_says_what_it_wants_when_called():
    library = build_library({"k": launches(2.0)}, "sm_90")
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match="CUDA"):
        library["k"](x, x, x, x, torch.tensor([4]))


@pytest.fixture
def run_time():
    """TVM's CUDA run time is there, as far as compiling goes; other compilations get ``theirs``."""
    factory, made = "ffi.Module.create.cuda", []

    def create(code, form, functions, sources):
        assert form == "cuda"
        made.append(bytes(tvm.get_global_func(CALLBACK)(code.decode() if isinstance(code, bytes) else str(code))))
        return tvm.get_global_func("runtime.SourceModuleCreate")("", "cuda")

    tvm_ffi.register_global_func(factory, create)
    try:
        yield made
    finally:
        tvm_ffi.registry.remove_global_func(factory)


@without_gpu
def test_with_a_driver_the_module_holds_our_machine_code(run_time):
    functions = {"k": launches(2.0)}
    build_library(functions, "sm_80")
    (ours,) = run_time
    assert ours == nvrtc.compiled(cuda_source(functions, "sm_80"), "sm_80")


@without_gpu
def test_other_users_of_tvm_keep_their_own_compilation(run_time, monkeypatch):
    """Also while a module of ours is built, in another thread."""
    build_library({"k": launches(2.0)}, "sm_80")
    monkeypatch.setattr(build, "_REPLACED", [lambda source: b"theirs"])
    theirs = []

    def ours_runs(source):
        thread = threading.Thread(target=lambda: theirs.append(bytes(tvm.get_global_func(CALLBACK)("int x;"))))
        thread.start()
        thread.join()
        return b"ours"

    with build._compiling(ours_runs):
        assert bytes(tvm.get_global_func(CALLBACK)("int x;")) == b"ours"
    assert theirs == [b"theirs"] and bytes(tvm.get_global_func(CALLBACK)("int x;")) == b"theirs"


@without_gpu
def test_code_that_another_callback_made_is_refused(run_time):
    build_library({"k": launches(2.0)}, "sm_80")
    ours = tvm.get_global_func(CALLBACK)
    tvm_ffi.register_global_func(CALLBACK, lambda source: b"fast math", override=True)
    try:
        with pytest.raises(RuntimeError, match=f"compiled by another {CALLBACK} than this package's"):
            build_library({"k": launches(3.0)}, "sm_80")
    finally:
        tvm_ffi.register_global_func(CALLBACK, ours, override=True)


class Library(dict):
    """Notes the place where it is released."""

    def __init__(self, gone):
        self.gone = gone

    def __del__(self):
        self.gone.append(threading.current_thread())


def test_a_library_is_let_go_where_the_next_one_is_built():
    """Its module's destructor changes the current device of the thread that it runs in."""
    gone = []
    build = Build(lambda: Library(gone))
    kernels = [Built(lambda name=name, build=build: (name, build.result()), build) for name in "ab"]
    hold(kernels)
    functions = [kernel.function for kernel in kernels]
    del build, kernels[0], functions
    let_go()
    gc.collect()
    assert not gone
    kernels.clear()
    gc.collect()
    assert not gone, "nobody uses it, and the user's thread does not unload it"
    assert Build(let_go).result() is None
    gc.collect()
    assert len(gone) == 1 and gone[0] is not threading.current_thread()
