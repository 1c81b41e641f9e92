"""Attention with a learned bias: eager's kernel, its dropout, and the bias's gradient."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.compile import CallLibrary
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


class Window(nn.Module):
    """Attention in windows of 7 x 7, with relative positions; eager takes the kernel if rows of the bias are dense."""

    def __init__(self, width=32, rate=0.0, tokens=49, dense=True):
        super().__init__()
        self.dense = dense
        self.qkv, self.out = nn.Linear(3 * width, 9 * width), nn.Linear(3 * width, 3 * width)
        self.table, self.rate = nn.Embedding(2 * tokens - 1, 3), rate

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 3, width // 3).permute(2, 0, 3, 1, 4)
        places = torch.arange(tokens, device=x.device)
        bias = self.table(places[:, None] - places + tokens - 1).permute(2, 0, 1)[None]
        bias = bias.contiguous() if self.dense else bias
        y = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), self.rate if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(x.shape))


CASES = {
    "float32": (torch.float32, None, 1e-4),
    "bfloat16": (torch.bfloat16, None, 3e-2),
    "autocast to bfloat16": (torch.float32, torch.bfloat16, 3e-2),
    "autocast to float16": (torch.float32, torch.float16, 1e-2),
}


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("tokens", "dense"), [(49, True), (64, True), (49, False)])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_eagers(name, tokens, dense, rate):
    dtype, cast, bound = CASES[name]
    torch.manual_seed(0)
    eager = Window(rate=rate, tokens=tokens, dense=dense).to(DEVICE, dtype)
    ours, x = copy.deepcopy(eager), torch.randn(6, tokens, 96, device=DEVICE, dtype=dtype).requires_grad_()

    def context():
        return nullcontext() if cast is None else torch.autocast("cuda", cast)

    with context():
        add_tvm_dispatch(ours, x)
    for seed in range(6):  # launched, then recorded
        found = []
        for module in (eager, ours):
            given = x.detach().clone().requires_grad_()
            torch.manual_seed(seed)
            with context():
                y = module(given)
            grads = torch.autograd.grad(y.float().sin().sum(), [given, *module.parameters()])
            found.append((y, *grads, torch.cuda.get_rng_state()))
        for want, have in zip(*found, strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape
            far = torch.linalg.vector_norm(have.double() - want.double()).item()
            assert far <= bound * torch.linalg.vector_norm(want.double()).item()
    assert not stats(ours).misses


def test_it_is_one_call_of_eagers_kernel():
    torch.manual_seed(0)
    module, x = Window(rate=0.1).to(DEVICE, torch.bfloat16), torch.randn(4, 49, 96, device=DEVICE).bfloat16()
    add_tvm_dispatch(module, x)
    (entry,) = stats(module).entries
    names = [step.name for step in (*entry.forward.steps, *entry.backward.steps) if isinstance(step, CallLibrary)]
    assert "dropping_attention" in names and "dropping_attention_backward" in names
    assert not any(name.startswith("bmm") for name in names)
