"""Joined products of gradients: the numbers of separate ones, in float64; fewer products; products that stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from bridge import lower
from bridge.aten.nn import cuda_flash
from bridge.aten.registry import CONVERSIONS
from bridge.base.torch_internals import aten
from bridge.compile import CallLibrary, Compilation, CompileOptions
from bridge.compile.cpu.backend import CpuBackend, host_backend
from bridge.compile.cuda.products import CudaProducts
from tests.sampling import sampled, spread


class Separate(CudaProducts):
    """A GPU's policy that joins nothing."""

    joins = False


class Joining(CpuBackend):
    """The CPU with a GPU's products."""

    policy = CudaProducts

    @property
    def key(self) -> str:
        return f"{type(self).__name__} {super().key}"

    def products(self, threads: int, deterministic: bool) -> CudaProducts:
        return self.policy()


class NotJoining(Joining):
    policy = Separate


class Attention(nn.Module):
    """Queries of ``x``; keys and values of ``x``, or of a memory, perhaps with fewer heads."""

    def __init__(self, bias=True, groups=4, memory=False):
        super().__init__()
        self.query = nn.Linear(24, 4 * 6, bias)
        self.key, self.value = (nn.Linear(24, groups * 6, bias) for _ in range(2))
        self.memory = memory

    def forward(self, x, memory=None):
        source = memory if self.memory else x
        q, k, v = (
            layer(given).unflatten(-1, (-1, 6)).transpose(1, 2)
            for layer, given in ((self.query, x), (self.key, source), (self.value, source))
        )
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        y = torch.softmax(q @ k.transpose(2, 3) / 3, -1) @ v
        return y.transpose(1, 2).flatten(2)


class Fused(Attention):
    """Attention by one of CUDA's kernels, whose gradients lie in the order in which they are multiplied."""

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, 6)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Twice(nn.Module):
    """The input of one attention is the other's result, and a projection of both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention(bias=False)

    def forward(self, x):
        y = self.first(x)
        return self.second(x + y) + y


class Tied(nn.Module):
    """One weight for keys and queries; the gradient of a key is read twice."""

    def __init__(self):
        super().__init__()
        self.both, self.value = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        q, v = (layer(x).unflatten(-1, (4, 6)).transpose(1, 2) for layer in (self.both, self.value))
        return (torch.softmax(q @ q.transpose(2, 3), -1) @ v).transpose(1, 2).flatten(2)


CASES = {
    # make, shapes of the inputs, whether they want gradients, products in the backward: separate, joined
    "biases": (Attention, [(3, 10, 24)], True, 6, 2),
    "no biases": (lambda: Attention(bias=False), [(3, 10, 24)], True, 6, 2),
    "an input without a gradient": (Attention, [(3, 10, 24)], False, 3, 1),
    "fewer keys": (lambda: Attention(groups=2), [(3, 10, 24)], True, None, None),
    "fused": (Fused, [(3, 10, 24)], True, 6, 2),
    "fused, no biases": (lambda: Fused(bias=False), [(3, 10, 24)], True, 6, 2),
    "a memory": (lambda: Attention(memory=True), [(3, 10, 24), (3, 7, 24)], True, 6, 4),
    "twice": (Twice, [(3, 10, 24)], True, 12, 4),
    "tied": (Tied, [(3, 10, 24)], True, None, None),
}


@pytest.fixture(autouse=True)
def cuda_attention(monkeypatch):
    """Fused attention is taken for CUDA's, which has a formula for CPUs."""

    def convert(importer, node, q, k, v, rate=0.0, is_causal=False, *, attn_mask=None, scale=None):
        return cuda_flash(importer, node, q, k, v, rate, is_causal, scale=scale)

    monkeypatch.setitem(CONVERSIONS, aten._scaled_dot_product_flash_attention_for_cpu.default, convert)


def programs(make, shapes, wanted, dtype=torch.float64, varying=None, backends=(NotJoining, Joining)):
    torch.manual_seed(0)
    module = make().to(dtype)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=wanted) for shape in shapes]
    backward = lower(module, tuple(inputs), dynamic_shapes=varying).backward
    host = host_backend()
    found = []
    for backend in backends:
        options = CompileOptions.current(backend(target=host.target, order=host.order, limits=host.limits))
        found.append(Compilation(backward, "bw", replace(options, grad_outs=1)).finish())
    return found


def given(program):
    """Random inputs of a program, the same for equal ones."""
    torch.manual_seed(1)
    drawn = [torch.randn(each.shape, dtype=torch.float64) for each in program.layout.params]
    return [x.to(getattr(torch, each.dtype)) for x, each in zip(drawn, program.layout.params, strict=True)]


def products(program) -> int:
    return Counter(step.name for step in program.steps if isinstance(step, CallLibrary))["mm"]


@pytest.mark.parametrize("name", sampled(CASES, spread(CASES)))
def test_numbers_are_those_of_separate_products(name):
    make, shapes, wanted, separate, joined = CASES[name]
    apart, together = programs(make, shapes, wanted)
    for ours, theirs in zip(together(given(together)), apart(given(apart)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert products(together) <= products(apart)
    assert separate is None or products(apart) == separate
    assert joined is None or products(together) == joined


@pytest.mark.parametrize("name", sampled(["biases", "fused", "a memory", "twice"], ["fused", "a memory"]))
def test_lengths_that_vary(name):
    """Dynamic lengths join the same products, without further guards."""
    make, shapes, wanted, separate, joined = CASES[name]
    varying = tuple({1: torch.export.Dim(f"length_{place}", max=64)} for place in range(len(shapes)))
    (apart,) = programs(make, shapes, wanted, varying=varying, backends=[NotJoining])
    (together,) = programs(make, shapes, wanted, varying=varying, backends=[Joining])
    assert (products(apart), products(together)) == (separate, joined)
    assert set(map(str, together.scope.guards)) <= set(map(str, apart.scope.guards))
    for length in (10, 17):
        sizes = {symbol.name: length + place for place, symbol in enumerate(apart.scope.samples)}
        apart_there, together_there = apart.at(sizes), together.at(sizes)
        for ours, theirs in zip(together_there(given(together_there)), apart_there(given(apart_there)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=str)
def test_other_types(dtype):
    apart, together = programs(Attention, [(3, 10, 24)], True, dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for ours, theirs in zip(together(given(together)), apart(given(apart)), strict=True):
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())
    assert products(together) < products(apart)


def test_large_weights_fill_a_gpu_by_themselves(monkeypatch):
    monkeypatch.setattr("bridge.compile.passes.join_products._SMALL", 24 * 24 - 1)
    apart, together = programs(Attention, [(3, 10, 24)], True)
    assert products(apart) == products(together) == 6
