"""The CUDA backend as the compiler sees it, without a GPU: programs, their kernels, files and texts."""

from __future__ import annotations

import struct
import threading
from dataclasses import replace

import pytest
import torch
from tvm import relax
from tvm.relax import op

from bridge.base.session import SESSION
from bridge.compile import CompileOptions, Launch, Program, backend_for, compile_function, settle
from bridge.compile.cuda import nvrtc
from bridge.compile.cuda.nvrtc import compiled
from bridge.compile.cuda.products import CudaProducts
from bridge.compile.runtime.storage import load, save
from bridge.compile.schedule.products import LayoutClass, ProductShape
from tests.bridge.compile_helpers import function
from tests.nvrtc import ARCHES, needs_nvrtc

pytestmark = needs_nvrtc

GPU = backend_for({"kind": "cuda", "arch": "sm_90"})


def program(params, body, backend=GPU) -> Program:
    return compile_function(function(params, body), name="test", options=CompileOptions.current(backend))


def scaled(emit, x, scale):
    return [emit(op.exp(emit(op.multiply(x, emit(op.tanh(scale))))))]


SCALED = [((200, 120), "float32"), ((120,), "float32")]


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_of_a_program_are_functions_of_one_module(arch):
    SESSION.reset("programs")
    made = program(SCALED, scaled, replace(GPU, arch=arch))
    assert made.layout.params[0].shape == (200, 120) and made.backend.device == torch.device("cuda", 0)
    functions = [built.function for built in made.code.values()]
    assert len(functions) == len(made.kernels) > 1
    assert len({id(built.build) for built in made.code.values()}) == 1


def test_nvrtc_is_loaded_once_while_something_else_goes_on(monkeypatch):
    asked_for, compile_source = [], nvrtc._compile

    def watched(source, arch, form):
        asked_for.append((arch, threading.current_thread() is threading.main_thread()))
        return compile_source(source, arch, form)

    monkeypatch.setattr(nvrtc, "_compile", watched)
    for _ in range(2):
        replace(GPU, arch="sm_86").prepare([])
        settle()
    assert asked_for == [("sm_86", False)]


def test_devices_of_one_architecture_share_kernels_and_not_programs():
    one, other = (program(SCALED, scaled, replace(GPU, index=index)) for index in range(2))
    assert one is not other and one.backend.key != other.backend.key
    assert [id(built) for built in one.code.values()] == [id(built) for built in other.code.values()]


def test_a_program_is_written_to_a_file_and_read_back(tmp_path):
    def body(emit, x):
        table = op.reshape(op.arange(0, 120, 1, "float32"), (120,))
        return [emit(op.tanh(emit(op.add(x, emit(table)))))]

    made = program([((200, 120), "float32")], body)
    save(made, tmp_path / "program")
    again = load(tmp_path / "program", GPU)
    assert again == made
    for name in made.kernels:
        assert again.source(name, "cuda") == made.source(name, "cuda")
    for other in (replace(GPU, arch="sm_80"), replace(GPU, index=1), backend_for(None)):
        with pytest.raises(ValueError, match="was saved for backend"):
            load(tmp_path / "program", other)


def test_forms_of_a_kernel():
    made = program(SCALED, scaled)
    (*_, kernel) = made.kernels
    assert "launch_thread" in made.source(kernel) and "__global__" in made.source(kernel, "cuda")
    assert ".target sm_90" in made.source(kernel, "ptx")
    with pytest.raises(ValueError, match="form: wanted one of 'tvmscript', 'cuda', 'ptx', 'sass', got 'llvm'"):
        made.source(kernel, "llvm")
    with pytest.raises(RuntimeError, match="refuses"):
        compiled("__global__ void", "sm_90")


def test_a_program_says_what_each_kernel_launches():
    made = program(SCALED, scaled)
    kernel, *_ = (step for step in reversed(made.steps) if isinstance(step, Launch))
    assert made.launches(kernel) == (f"{-(-200 * 120 // 128)} x 128 threads",)
    assert f"multiply exp; 188 x 128 threads; {2 * 4 * 200 * 120 + 4 * 120} bytes" in str(made)
    host = program(SCALED, scaled, backend_for(None))
    assert not any(host.launches(step) for step in host.steps) and "threads" not in str(host)


@pytest.mark.parametrize("number", [1e-16, 1.2345e-13, 2.5e-308, 5e-324])
def test_a_small_double_is_in_the_kernel_bit_by_bit(number):
    """TVM's writer of C keeps 15 places after the point."""
    constant = relax.const(torch.tensor(number, dtype=torch.float64).numpy(), "float64")
    made = program([((4,), "float64")], lambda emit, x: [emit(op.multiply(x, constant))])
    (*_, kernel) = made.kernels
    assert struct.pack(">d", number).hex().upper() in made.source(kernel, "ptx")


@pytest.mark.parametrize(
    ("shape", "unit", "by_lt"),
    [
        *(((rows, 128, 512), unit, rows in (8, 16)) for rows in (1, 8, 16, 32) for unit in ("row", "column")),
        *(((16, 512, 128), unit, unit == "column") for unit in ("row", "column")),
        *(((16, 768, 768), "column", False), ((16, 64, 64), "column", False)),
    ],
)
def test_small_products_that_cublas_is_slow_at_are_cublas_lts(shape, unit, by_lt):
    product = ProductShape("float32", 1, *shape, b=LayoutClass(unit))
    assert CudaProducts().choose(product) == ("mm_lt" if by_lt else "mm")
    assert CudaProducts().choose(replace(product, element_type="float64")) == "mm"
