"""Programs and libraries for GPUs on disk, without a GPU: another process finds the code compiled for its kind."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm.relax import op

import bridge.compile.pipeline as pipeline
from bridge.artifact import current_store
from bridge.base.session import SESSION
from bridge.compile import CompileOptions, DrawnMask
from bridge.compile.cuda import build
from bridge.compile.cuda.backend import CudaBackend
from bridge.compile.cuda.build import build_library
from tests.bridge.compile_helpers import function
from tests.nvrtc import without_gpu

LOADER = "ffi.Module.load_from_bytes.cuda"
MASK = DrawnMask(0.1, 4, 1024)


@pytest.fixture
def seen(monkeypatch, used_cache):
    """Counts of builds, and loaded libraries; a stand-in replaces TVM's CUDA run time, which wants a driver."""
    found = {"built": 0, "graphs": 0, "loaded": []}

    def count(what, result):
        found[what] += 1
        return result

    def load(content):
        found["loaded"].append(bytes(content))
        return tvm.get_global_func("runtime.CSourceModuleCreate")("", "c", [], [])

    monkeypatch.setattr(build, "build_library", lambda *given, real=build_library: count("built", real(*given)))
    monkeypatch.setattr(pipeline, "_Graphs", lambda *given, real=pipeline._Graphs: count("graphs", real(*given)))
    monkeypatch.setattr(build, "_CUDA_RUN_TIME", "target.build.cuda")
    tvm_ffi.register_global_func(LOADER, load)
    yield found
    tvm_ffi.remove_global_func(LOADER)
    SESSION.reset("programs")


def compiled(rate: float = 0.1, arch: str = "sm_90", index: int = 0):
    """A program that draws a mask, as a new process compiles it."""
    SESSION.reset("programs")
    func = function(
        [((48, 64), "float32"), ((48, 64), "bool")], lambda emit, x, mask: [emit(op.where(mask, op.exp(x), x))]
    )
    options = CompileOptions.current(CudaBackend(arch=arch, index=index))
    made = pipeline.Compilation(func, "f", options, {1: DrawnMask(rate, MASK.width, MASK.threads)})
    program = made.finish()
    for built in program.code.values():
        assert built.function is not None
    made.keep()
    return program


@without_gpu
def test_another_process_compiles_nothing(seen):
    first = compiled()
    assert (seen["built"], seen["graphs"]) == (1, 1)
    again = compiled()
    assert (seen["built"], seen["graphs"]) == (1, 1)
    assert again is not first and again == first
    assert len(seen["loaded"]) == 2 and len(set(seen["loaded"])) == 1


@without_gpu
@pytest.mark.parametrize("other", [{"rate": 0.2}, {"arch": "sm_80"}, {"index": 1}])
def test_what_a_program_depends_on_is_its_key(seen, other):
    compiled()
    compiled(**other)
    assert seen["graphs"] == 2
    assert seen["built"] == (1 if "index" in other else 2), "devices of one architecture share kernels"


@without_gpu
@pytest.mark.parametrize("kind", ["library", "kernel", "program"])
def test_damaged_files_cost_a_compilation(seen, kind):
    first = compiled()
    for path in [path for path in current_store().files() if path.parent.parent.name == kind]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert compiled() == first
    assert seen["graphs"] == 2


@without_gpu
def test_without_a_driver_no_library_is_kept(seen, monkeypatch):
    monkeypatch.setattr(build, "_CUDA_RUN_TIME", "no such function")
    compiled()
    assert not list(current_store().files())
