"""Gradients of embeddings on a GPU: eager's in float64, the same bits at each call, none of the library's sorts."""

from __future__ import annotations

import copy

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
        largest = wanted.abs().max()
        assert (found - wanted).abs().max() <= torch.finfo(dtype).eps * largest
        assert torch.equal(gradient(ours, indices, grad), found)
    assert not stats(ours).misses
