"""A GPU's generator around a dispatched module: seeds, forks, states put back, checkpoints: eager's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE, generators
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


class Noisy(nn.Module):
    """Masks that kernels compute, and numbers that torch draws, on the GPU and on the host."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        h = F.dropout(self.first(x), 0.3)
        h = h + 0.1 * torch.randn_like(h) + torch.rand((), device="cpu").to(h.device)
        return F.dropout(self.second(h), 0.5).tanh()


@pytest.fixture
def pair():
    torch.manual_seed(0)
    eager, x = Noisy().to(DEVICE), torch.randn(33, 64, device=DEVICE, requires_grad=True)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, x)
    return module, eager, x


def seeded(module, x):
    torch.cuda.manual_seed(7)
    return module(x)


def seeded_everywhere(module, x):
    torch.cuda.manual_seed_all(1 << 40)
    torch.randn(5, device=DEVICE)
    return module(x)


def negative_seed(module, x):
    torch.manual_seed(-5)
    return module(x)


def forked(module, x):
    with torch.random.fork_rng():
        torch.cuda.manual_seed(3)
        inside = module(x)
    return inside + module(x)


def put_back(module, x):
    state = torch.cuda.get_rng_state()
    first = module(x)
    torch.cuda.set_rng_state(state)
    return first + module(x)


def generator_put_back(module, x):
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state() if hasattr(generator, "clone_state") else generator.get_state()
    module(x)
    generator.set_state(state.get_state() if isinstance(state, torch.Generator) else state)
    return module(x)


def checkpointed(module, x):
    return checkpoint(module, x, use_reentrant=False)


def checkpointed_around(module, x):
    return checkpoint(lambda given: module(F.dropout(given, 0.2)) * 2, x, use_reentrant=False)


WAYS = (
    seeded,
    seeded_everywhere,
    negative_seed,
    forked,
    put_back,
    generator_put_back,
    checkpointed,
    checkpointed_around,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_numbers_are_eagers(pair, way):
    """Outputs, gradients and the generators' states, in two steps."""
    results = []
    for module in pair[:2]:
        torch.manual_seed(1)
        found = []
        for _ in range(2):
            x = pair[2].detach().clone().requires_grad_()
            module.zero_grad()
            made = way(module, x)
            made.square().sum().backward()
            found += [made.detach(), x.grad, *(parameter.grad.clone() for parameter in module.parameters())]
        results.append((found, generators()))
    (made, own), (wanted, state) = results
    assert torch.equal(own, state)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, other.abs().max().item()))
    assert stats(pair[0]).hits and not stats(pair[0]).misses, stats(pair[0])
