"""Transcendental functions of a GPU's kernels: the bits of eager's, over the whole float range."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.compile.test_fastmath import FUNCTIONS, floats
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


class Functions(nn.Module):
    """Each function of the same numbers."""

    def forward(self, x):
        return tuple(getattr(torch, name)(x) for name in FUNCTIONS)


class Extremes(nn.Module):
    """Of rows and of columns, with nan and both zeros among them."""

    def forward(self, x):
        return x.amax(1), x.amin(1), x.amax(0), x.amin(0), torch.maximum(x, x.flip(0)), torch.minimum(x, x.flip(0))


class Arithmetic(nn.Module):
    """Sums, differences and products of two numbers, each rounded, one after another."""

    def forward(self, x, y):
        return x + y, x - y, x * y, (x + y) * (x - 0.5) - y * 3.0, x * 0.3 + y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_arithmetic_of_half_types_has_eagers_bits(dtype):
    """Every number with 64 others, zeros of both signs, infinities and denormals among them."""
    torch.manual_seed(0)
    every = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16)
    other = every[torch.randperm(2**16, device=DEVICE)[:60]]
    other = torch.cat([other, torch.tensor([0, -(2**15), 0x7F80, 1], dtype=torch.int16, device=DEVICE)])
    x, y = (each.contiguous().view(dtype) for each in torch.meshgrid(every, other, indexing="ij"))
    module = Arithmetic()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (x, y))
    with torch.no_grad():
        ours, theirs = module(x, y), eager(x, y)
    assert stats(module).hits == 1
    for one, two in zip(ours, theirs, strict=True):
        same = (one.view(torch.int16) == two.view(torch.int16)) | (one.isnan() & two.isnan())
        assert bool(same.all()), (int((~same).sum()), x[~same][:4], y[~same][:4], one[~same][:4], two[~same][:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_functions_have_eagers_bits(dtype):
    x = floats().to(DEVICE, dtype)
    module = Functions()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    with torch.no_grad():
        ours, theirs = module(x), eager(x)
    assert stats(module).hits == 1
    for name, one, other in zip(FUNCTIONS, ours, theirs, strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        assert bool(same.all()), (name, int((~same).sum()), x[~same][:4], one[~same][:4], other[~same][:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_largest_and_smallest(dtype):
    torch.manual_seed(0)
    x = torch.randn(70, 300, device=DEVICE).to(dtype)
    x[3, 5], x[4, 7], x[5, 9] = float("nan"), float("inf"), float("-inf")
    x[6], x[6, ::2] = 0.0, -0.0
    module = Extremes()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for ours, theirs in zip(module(x), eager(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
