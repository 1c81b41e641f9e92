"""Whole programs for CUDA, forward and backward: every kernel is compiled, for each architecture, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import nn
from transformers import ConvNextConfig, GPT2Config
from transformers.models.convnext.modeling_convnext import ConvNextLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from benchmarks.lstm import LayerNormLSTM
from benchmarks.recurrent_cells import LSTM
from bridge import lower
from bridge.compile import Built, CallLibrary, CompileOptions, Launch, MakeView, RunLoop, backend_for, compile_function
from bridge.compile.cuda.backend import CudaBackend
from bridge.compile.cuda.build import build_library, cuda_source
from bridge.compile.cuda.nvrtc import compiled
from bridge.library import OUT_KERNELS
from tests.bridge.models import bert_layer
from tests.nvrtc import ARCHES, needs_nvrtc

pytestmark = needs_nvrtc


@dataclass(frozen=True)
class Collecting(CudaBackend):
    """Keeps kernels, which are compiled together at the end."""

    kernels: dict = field(default_factory=dict, compare=False)

    def build(self, functions):
        self.kernels.update((f"m{len(self.kernels)}_{name}", function) for name, function in functions)
        return [Built(lambda: None) for _ in functions]


def gpt2_block() -> nn.Module:
    return GPT2Block(GPT2Config(n_embd=24, n_head=3, n_positions=40, attn_implementation="eager"), layer_idx=0)


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(12, 20)

    def forward(self, x, h, c):
        return self.cell(x, (h, c))


class Mixer(nn.Module):
    """Patches whose numbers are mixed across tokens, then across features, under autocast, and averaged.

    The average's gradient is equal for all tokens, and each kernel that reads it casts it.
    """

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.norm, self.across, self.back = nn.LayerNorm(64), nn.Linear(49, 32), nn.Linear(32, 49)
        self.along, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = x + self.back(nn.functional.gelu(self.across(self.norm(x).transpose(1, 2)))).transpose(1, 2)
            x = x + self.along(nn.functional.gelu(x))
            return self.head(x.mean(1))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 24, padding_idx=0), nn.Linear(24, 12), nn.Tanh())


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


CASES = {
    "BertLayer": (bert_layer, lambda: rows(3, 17, 24)),
    "GPT-2 block in bfloat16": (lambda: gpt2_block().bfloat16(), lambda: rows(3, 17, 24, dtype=torch.bfloat16)),
    "ConvNeXt block": (lambda: ConvNextLayer(ConvNextConfig(), dim=12), lambda: rows(2, 12, 9, 7)),
    "Mixer under autocast": (Mixer, lambda: rows(64, 3, 28, 28)),
    "words": (words, lambda: torch.randint(0, 50, (3, 17))),
    "LSTM step in float16": (
        lambda: Step().half(),
        lambda: tuple(rows(5, size, dtype=torch.float16) for size in (12, 20, 20)),
    ),
}


@cache
def lowered_case(name):
    make, sample = CASES[name]
    torch.manual_seed(0)
    return lower(make().train(), sample())


@pytest.fixture(scope="module")
def collected():
    """Kernels and programs by case."""
    kernels, programs = {}, {}
    for name in CASES:
        backend = Collecting(arch=ARCHES[0])
        options = CompileOptions.current(backend)
        lowered = lowered_case(name)
        functions = {"forward": lowered.forward, "backward": lowered.expected_backward}
        programs[name] = [compile_function(func, name=key, options=options) for key, func in functions.items()]
        kernels[name] = backend.kernels
    return kernels, programs


def check_compiled(kernels, arch):
    cubin = compiled(cuda_source(kernels, arch), arch)
    assert cubin.startswith(b"\x7fELF") and all(f"{name}_kernel".encode() in cubin for name in kernels)


@pytest.mark.parametrize(("name", "arch"), [(name, ARCHES[index % 2]) for index, name in enumerate(CASES)])
def test_every_kernel_is_compiled(name, arch, collected):
    check_compiled(collected[0][name], arch)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "arch"), [(name, ARCHES[1 - index % 2]) for index, name in enumerate(CASES)])
def test_every_kernel_is_compiled_for_the_other_architecture(name, arch, collected):
    check_compiled(collected[0][name], arch)


def test_host_code_is_built(collected):
    kernels = collected[0]["LSTM step in float16"]
    library = build_library(kernels, ARCHES[1])
    assert all(library[name] is not None for name in kernels)


@pytest.mark.parametrize("name", CASES)
def test_a_programs_products_are_torchs_and_launches_have_shapes(name, collected):
    _, programs = collected
    for program in programs[name]:
        assert any(isinstance(step, CallLibrary) for step in program.steps)
        assert not any(step.name.startswith("product_") for step in program.steps)
        assert all(program.launches(step) for step in program.steps if isinstance(step, Launch))
        assert program.backend.device == torch.device("cuda", 0) != backend_for(None).device


def test_equal_layers_share_their_kernels():
    kernels = []
    for layers in (3, 5):
        torch.manual_seed(0)
        backend = Collecting(arch=ARCHES[0])
        blocks = [nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU()) for _ in range(layers)]
        lowered = lower(nn.Sequential(*blocks), rows(64, 48))
        options = CompileOptions.current(backend)
        program = compile_function(lowered.expected_backward, name="stack", options=options)
        kernels.append(len(backend.kernels))
        assert sum(isinstance(step, Launch) for step in program.steps) >= 2 * layers
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize("tf32", [False, True])
def test_products_of_few_rows_in_tf32_are_cublas_lts(tf32, monkeypatch):
    monkeypatch.setattr("bridge.compile.cuda.backend.products_are_tf32", lambda: tf32)
    torch.manual_seed(0)
    with torch.no_grad():
        width = 8 if tf32 else 4  # programs of one function would be shared
        lowered = lower(LSTM(width).train(), rows(32, 5, width))
    program = compile_function(lowered.forward, name="tf32", options=CompileOptions.current(Collecting(arch=ARCHES[0])))
    (loop,) = [step for step in program.steps if isinstance(step, RunLoop)]
    products = [step.name for step in loop.steps if isinstance(step, CallLibrary)]
    assert products == ["mm_lt" if tf32 else "mm"]
    a, b, out = torch.randn(32, 5), torch.randn(7, 5).t(), torch.empty(32, 7)
    OUT_KERNELS[products[0]]([out], [a, b])
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize(("cell", "launches"), [(LSTM, 1), (LayerNormLSTM, 2)])
def test_a_step_of_a_cell_is_a_product_and_few_launches(cell, launches, monkeypatch):
    monkeypatch.setattr("bridge.lowering.pipeline.HOST", torch.device("meta"))  # it is lowered as for a GPU
    torch.manual_seed(0)
    lowered = lower(cell(16).train(), rows(8, 5, 16))
    options = CompileOptions.current(Collecting(arch=ARCHES[0]))
    found = []
    for function in (lowered.forward, lowered.expected_backward):
        program = compile_function(function, name="cell", options=options)
        (loop,) = [step for step in program.steps if isinstance(step, RunLoop)]
        found.append([type(step) for step in loop.steps if not isinstance(step, MakeView)])
    assert found == [[CallLibrary, *[Launch] * launches], [*[Launch] * launches, CallLibrary]]
