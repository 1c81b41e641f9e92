"""Lookups on a GPU, and their gradients: eager's in float64, the same bits at each call; indices out of range."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU

#: rows of the table, columns, indices, options
CASES = {
    "words": (5000, 768, (8, 128), {"padding_idx": 0}),
    "a row for all": (2, 96, (16, 200), {}),
    "narrow": (300, 3, (4000,), {}),
    "more than are compared": (1000, 8, (40, 1000), {}),
}


def lookups(table, shape):
    """The lower an index, the more often it is there."""
    return (torch.rand(shape, device=DEVICE) ** 5 * table).long()


def gradient(module, indices, grad):
    module.weight.grad = None
    module(indices).backward(grad)
    return module.weight.grad


def roundings(dtype, times):
    """Half of a sum's rounding errors, of two sums of so many addends in two orders; halves add up in float32."""
    return times if dtype == torch.float64 else 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients(case, dtype):
    torch.manual_seed(0)
    table, columns, shape, options = case
    eager = nn.Embedding(table, columns, device=DEVICE, dtype=dtype, **options)
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, lookups(table, shape))
    for _ in range(4):
        indices = lookups(table, shape)
        grad = torch.randn(*shape, columns, device=DEVICE, dtype=dtype)
        found = gradient(ours, indices, grad).clone()
        wanted = gradient(copy.deepcopy(eager).double(), indices, grad.double())
        size = gradient(copy.deepcopy(eager).double(), indices, grad.double().abs())
        times = torch.bincount(indices.flatten(), minlength=table).clamp(1)[:, None]
        assert bool(((found - wanted).abs() <= torch.finfo(dtype).eps * roundings(dtype, times) * size).all())
        assert torch.equal(gradient(ours, indices, grad), found)
    assert not stats(ours).misses


def test_a_length_that_varies():
    torch.manual_seed(0)
    eager = nn.Embedding(700, 64, padding_idx=3, device=DEVICE, dtype=torch.float64)
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, lookups(700, (8, 30)), dynamic_shapes=({1: torch.export.Dim("length", max=4096)},))
    for length in (30, 7, 2000, 31, 7, 30, 7, 30):
        indices = lookups(700, (8, length))
        grad = torch.randn(8, length, 64, device=DEVICE, dtype=torch.float64)
        torch.testing.assert_close(gradient(ours, indices, grad), gradient(eager, indices, grad), rtol=0, atol=1e-11)
    assert not stats(ours).misses


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(90, 24, dtype=torch.float64))

    def forward(self, indices):
        return self.table[indices]


@pytest.mark.parametrize("count", [700, 30_000])
def test_rows_by_indices_from_either_end(count):
    torch.manual_seed(0)
    eager = Rows().to(DEVICE)
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, torch.zeros(count, dtype=torch.long, device=DEVICE))
    for _ in range(3):
        indices = torch.randint(-90, 90, (count,), device=DEVICE)
        grad = torch.randn(count, 24, device=DEVICE, dtype=torch.float64)
        found = [torch.autograd.grad(module(indices), module.table, grad)[0] for module in (ours, eager)]
        torch.testing.assert_close(*found, rtol=0, atol=1e-11)
    assert not stats(ours).misses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("table", "columns", "count"), [(500, 768, 3000), (30, 1, 700), (90, 10, 41), (7, 64, 70_000)])
def test_rows(table, columns, count, dtype):
    torch.manual_seed(0)
    eager = nn.Embedding(table, columns, device=DEVICE, dtype=dtype)
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, lookups(table, (count,)))
    held = []
    for _ in range(6):
        indices = lookups(table, (count,))
        held.append((ours(indices), eager(indices)))
    assert all(torch.equal(mine, its) for mine, its in held)
    assert not stats(ours).misses


OUT_OF_RANGE = """
import torch
from bridge import add_tvm_dispatch, stats
module = torch.nn.Embedding(50, 8, device="cuda")
add_tvm_dispatch(module, torch.zeros(3, dtype=torch.long, device="cuda"))
for last in (49, {index}):
    module(torch.tensor([0, 1, last], device="cuda"))
    torch.cuda.synchronize()
    print("done", last, stats(module).hits)
"""


@pytest.mark.parametrize("index", [50, -1, 2**40])
def test_indices_out_of_range_end_the_work_as_in_eager(index):
    program = OUT_OF_RANGE.format(index=index)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "done 49 1" in ended.stdout and f"done {index}" not in ended.stdout, ended
    assert ended.returncode and "assert" in ended.stderr.lower(), ended.stderr  # reported by the next call
