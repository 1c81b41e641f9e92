"""Equal kernels are one: of all time steps of a loop, all layers, all batch sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from tvm_ffi import structural_equal, structural_hash

from bridge import lower
from bridge.base.session import SESSION
from bridge.compile import Built, CompileOptions, Program, backend_for, compile_function
from bridge.compile.schedule.access import Arguments


@pytest.fixture(autouse=True)
def no_machine_code(monkeypatch):
    """Kernels are counted, not run."""
    SESSION.reset("programs")
    monkeypatch.setattr(type(backend_for(None)), "build", lambda self, functions: [Built(None) for _ in functions])
    yield
    SESSION.reset("programs")


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, x):
        state = cell = x.new_zeros(x.shape[0], 6)
        states = []
        for step in range(x.shape[1]):
            state, cell = self.cell(x[:, step], (state, cell))
            states.append(state)
        return torch.stack(states, 1)


def layers(count):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


def compiled(module: nn.Module, *shape: int) -> list[Program]:
    torch.manual_seed(0)
    lowered = lower(module, torch.randn(shape, requires_grad=True))
    options = replace(CompileOptions.current(backend_for(None)), deterministic=True)
    backward = compile_function(lowered.backward, name="backward", options=options)
    return [compile_function(lowered.forward, name="forward", options=options), backward]


def same_kernels(a: Program, b: Program) -> bool:
    hashes = [sorted(map(structural_hash, program.kernels.values())) for program in (a, b)]
    if hashes[0] != hashes[1]:
        return False
    pairs = zip(*(sorted(program.kernels.values(), key=structural_hash) for program in (a, b)), strict=True)
    return all(structural_equal(*pair) for pair in pairs)


def test_as_many_steps_as_you_like():
    """They are a loop, whose body knows nothing of their number."""
    short, long = (compiled(Unrolled(), 3, steps, 6) for steps in (6, 12))
    for few, many in zip(short, long, strict=True):
        inside = [{name: each for name, each in made.kernels.items() if "loop" in name} for made in (few, many)]
        assert inside[0] and inside[0].keys() == inside[1].keys()
        assert all(structural_equal(kernel, inside[1][name]) for name, kernel in inside[0].items())
        assert len(many.steps) == len(few.steps)


@pytest.mark.sweep  # layers share their kernels in the same way, and steps are loops
def test_as_many_unrolled_steps_as_you_like(monkeypatch):
    """From the length at which sums over the steps are cut; 96 steps have as many kernels."""
    monkeypatch.setattr("bridge.capture.steady_call._find_loops", lambda real: None)
    short, long = (compiled(Unrolled(), 3, steps, 6) for steps in (24, 32))
    for few, many in zip(short, long, strict=True):
        assert len(many.kernels) == len(few.kernels) < len(few.steps) / 4
        assert len(many.steps) > 1.2 * len(few.steps)


def test_as_many_layers_as_you_like():
    for few, many in zip(compiled(layers(2), 2, 5, 16), compiled(layers(3), 2, 5, 16), strict=True):
        assert same_kernels(few, many)
        assert len(many.steps) > 1.3 * len(few.steps)


def test_one_kernel_for_all_batch_sizes():
    """As long as threads are not worth starting, or are."""
    module = nn.Sequential(nn.Linear(16, 20), nn.GELU(), nn.LayerNorm(20), nn.Softmax(-1))
    for few, many in zip(compiled(module, 5, 16, 16), compiled(module, 9, 16, 16), strict=True):
        assert same_kernels(few, many)


def test_an_argument_is_what_it_means_and_not_its_amount():
    arguments = Arguments()
    assert arguments.add(3, "rows") == arguments.add(3, "rows") != arguments.add(3, "chunks")
    assert arguments.numbers == [3, 3]
