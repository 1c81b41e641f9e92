"""``torch.set_default_device("cuda")`` around making, adding, calling and training a module: factories follow it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, explain, lower, stats
from tests.device import DEVICE, generators
from tests.gpu.marks import ON_A_GPU, two_gpus

pytestmark = ON_A_GPU


class Factories(nn.Module):
    """Tensors that forward makes without saying where; one that is the host's."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        x = F.dropout(self.linear(x), 0.3) * torch.arange(8) + torch.tensor([1.0, 2.0] * 4)
        host = torch.randn((), device="cpu").to(x.device)
        return x * torch.rand(8) + torch.zeros(5, 8).fill_(0.5) + torch.linspace(0, 1, 8) + host


@contextlib.contextmanager
def default(device) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def trained(module, steps=4):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, 8, requires_grad=True)
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), x.grad]
    return [*found, *(each.detach() for each in module.state_dict().values())], generators()


@pytest.mark.parametrize("way", [default, torch.device], ids=["set_default_device", "with torch.device"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_training_under_a_default_device(way, device):
    torch.manual_seed(0)
    with way(device):
        eager = Factories()
        module = copy.deepcopy(eager)
        assert eager.linear.weight.is_cuda
        x = torch.randn(5, 8, requires_grad=True)
        before = generators()
        add_tvm_dispatch(module, x)
        assert torch.equal(generators(), before)
        (made, own), (wanted, state) = trained(module), trained(eager)
        assert stats(module).hits == 4 and not stats(module).misses
        assert "threads" in str(explain(module, full=True))
    assert torch.equal(own, state)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_the_default_the_call_is_eagers():
    """Its factories make tensors of the host's there, which eager refuses beside the GPU's."""
    with default("cuda"):
        module = Factories()
        add_tvm_dispatch(module, torch.randn(5, 8))
        module(torch.randn(5, 8))
    with pytest.raises(RuntimeError, match="same device"):
        module(torch.randn(5, 8, device=DEVICE))
    (reason,) = stats(module).misses
    assert "called with False" in reason and "default device cuda:0" in reason


def test_checks_run_there():
    with default("cuda"):
        module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        assert lower(module, torch.randn(5, 8)).check().ok


@two_gpus
def test_the_current_device_is_the_default():
    with default("cuda"):
        with torch.cuda.device(1):
            module, x = Factories(), torch.randn(5, 8)
            add_tvm_dispatch(module, x)
            assert module(x).device.index == 1 and stats(module).hits == 1
        with pytest.raises(RuntimeError):
            module(x)
