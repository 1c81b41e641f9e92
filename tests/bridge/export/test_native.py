"""Native forms beside eager: loops and custom autograd Functions are compiled, operators of torch alone are named."""

from __future__ import annotations

import shutil

import pytest
import torch
import tvm
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, save_compiled
from bridge.compile import backend_for
from bridge.compile.cuda.backend import CudaBackend
from bridge.export.native import native_module
from tests.bridge.compare import Function
from tests.bridge.export.test_round_trip import Halved

pytestmark = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


class Cell(nn.Module):
    """A loop with a custom autograd Function in each step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 5)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 5)
        for part in x.unbind(1):
            h = Halved.apply(self.cell(part, h))
        return h


def test_a_loop_and_an_own_function(tmp_path):
    torch.manual_seed(0)
    module, x = Cell(), torch.randn(3, 6, 4)
    with torch.no_grad():
        save_compiled(add_tvm_dispatch(module, x), tmp_path / "cell", native=True)
        wanted = module(x)
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "cell" / "forward.so")), tvm.cpu())
    (found,) = map(torch.from_dlpack, machine["main"](tvm.runtime.from_dlpack(x)))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [backend_for(None), CudaBackend(arch="sm_90")], ids=["cpu", "cuda"])
def test_inputs_of_one_form_have_memory_of_their_own(backend):
    with torch.no_grad():
        lowered = lower(Function(torch.sub), (torch.ones(2, 3), torch.ones(2, 3)))
    text = backend.executable(native_module(lowered["forward"].function, [])).as_text()
    (inputs,) = (part for part in text.split("\n@") if part.startswith(("inputs:", "@inputs:")))
    assert inputs.count("vm.builtin.alloc_tensor ") == 2 and "ret" in inputs


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.fft.fft(x).real, "fft.* is torch's kernel: no native form"),
        (torch.linalg.svdvals, "linalg_svd.* is torch's kernel: no native form"),
        (lambda x: x.bernoulli(0.5), "random draws.* has no native form"),
        (lambda x: torch.complex(x, x), "complex numbers.* cannot be saved"),
    ],
)
def test_what_has_no_native_form_is_named(function, words, tmp_path):
    with torch.no_grad():
        module = add_tvm_dispatch(Function(function), torch.randn(3, 4))
    with pytest.raises(UnsupportedModule, match=f"(?s){words}"):
        save_compiled(module, tmp_path / "saved", native=True)
    assert not list(tmp_path.iterdir())


class Cancelled(nn.Module):
    """A product and a convolution of bfloat16 whose biases cancel them but for the last bits."""

    def __init__(self):
        super().__init__()
        self.linear, self.convolution = nn.Linear(33, 4), nn.Conv1d(1, 4, 33)

    def forward(self, x):
        return torch.addmm(self.linear.bias, x, self.linear.weight.t()), self.convolution(x[:, None])


def test_biases_are_added_before_rounding(tmp_path):
    torch.manual_seed(9590001)
    module, x = Cancelled(), torch.randn(3, 33).bfloat16()
    exact = module.bfloat16().double()
    with torch.no_grad():
        for layer, y in zip(exact.children(), exact(x.double()), strict=True):
            layer.bias += (layer.bias - y[0].flatten()).bfloat16() - layer.bias
        wanted = [y[0].flatten() for y in exact(x.double())]
        save_compiled(add_tvm_dispatch(module.bfloat16(), x), tmp_path / "saved", native=True)
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "saved" / "forward.so")), tvm.cpu())
    found = [torch.from_dlpack(each)[0].flatten().double() for each in machine["main"](tvm.runtime.from_dlpack(x))]
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-5)
