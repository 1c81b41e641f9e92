"""A user's own CUDA graph around a dispatched module: forward and backward captured, replays beside eager's graph."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


class Block(nn.Module):
    """A residual block; the function between its two products draws."""

    def __init__(self, between, width: int = 64):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, 2 * width), nn.LayerNorm(width), nn.Linear(2 * width, width)
        self.between = between

    def forward(self, x):
        return x + self.down(self.between(F.gelu(self.up(self.norm(x)))))


@dataclass
class Graph:
    """A captured step: static input, result, gradients."""

    graph: torch.cuda.CUDAGraph
    given: torch.Tensor
    made: torch.Tensor
    gradients: list[torch.Tensor]

    def __call__(self, x, seed):
        """Copies of the result and of the gradients for an input, and the generator's state afterwards."""
        torch.manual_seed(seed)
        with torch.no_grad():
            self.given.copy_(x)
        self.graph.replay()
        state = torch.cuda.get_rng_state()
        return [each.detach().clone() for each in (self.made, *self.gradients)], state


def captured(module, x) -> Graph:
    """As torch's notes on whole-network capture do it: warm up on a side stream, then capture."""
    given = x.clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            given.grad = None
            module(given).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    module.zero_grad(set_to_none=True)
    given.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = module(given)
        made.square().sum().backward()
    return Graph(graph, given, made, [given.grad, *(parameter.grad for parameter in module.parameters())])


BETWEEN = {
    "nothing": (lambda h: h, ""),
    "rand_like": (lambda h: h * torch.rand_like(h), None),
    "dropout": (lambda h: F.dropout(h, 0.3), "a CUDA graph is being captured"),
    "rand_like and dropout": (lambda h: F.dropout(h * torch.rand_like(h), 0.3), "a CUDA graph is being captured"),
}
"""Draw → function, and the captured call's reason for a miss, if any; ``None``: either is right."""


@pytest.mark.parametrize("drawn", BETWEEN)
def test_a_captured_step_replays_as_eagers(drawn):
    """New inputs and seeds at each replay; draws and the generator's state equal eager's graph's."""
    between, reason = BETWEEN[drawn]
    torch.manual_seed(0)
    eager, x = Block(between).to(DEVICE), torch.randn(48, 64, device=DEVICE)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, x.clone().requires_grad_())
    module(x.clone().requires_grad_())
    graphs = [captured(each, x) for each in (eager, module)]
    missed = list(stats(module).misses)
    if reason is not None:
        assert bool(missed) == bool(reason) and all(reason in each for each in missed), stats(module)
    for seed in range(4):
        given = torch.randn_like(x)
        (wanted, state), (made, own) = (graph(given, seed) for graph in graphs)
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())
        assert torch.equal(own, state)
    hits = stats(module).hits
    made = module(x.clone().requires_grad_())
    made.sum().backward()
    assert stats(module).hits == hits + 1 and made.isfinite().all()


def test_a_graph_is_not_disturbed_by_calls_between_its_replays():
    torch.manual_seed(0)
    module, x = Block(nn.Identity()).to(DEVICE), torch.randn(48, 64, device=DEVICE)
    add_tvm_dispatch(module, x.clone().requires_grad_())
    module(x.clone().requires_grad_()).sum().backward()
    graph = captured(module, x)
    (wanted, _) = graph(x, 0)
    for _ in range(3):
        other = (x * 3).requires_grad_()
        parameters = [parameter.grad for parameter in module.parameters()]
        torch.autograd.grad(module(other).sum(), other)
        filler = [torch.full((1 << 18,), float("nan"), device=DEVICE) for _ in range(8)]
        (made, _) = graph(x, 0)
        assert filler and all(torch.equal(one, two) for one, two in zip(made, wanted, strict=True))
        assert all(one is parameter.grad for one, parameter in zip(parameters, module.parameters(), strict=True))


def test_make_graphed_callables():
    """torch's own wrapper, which captures forward and backward apart."""
    torch.manual_seed(0)
    eager, x = Block(nn.Identity()).to(DEVICE), torch.randn(48, 64, device=DEVICE, requires_grad=True)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    module.zero_grad()
    graphed = torch.cuda.make_graphed_callables(lambda given: module(given), (x.detach().clone().requires_grad_(),))
    given = torch.randn_like(x).requires_grad_()
    (made,) = torch.autograd.grad(graphed(given).square().sum(), given)
    (wanted,) = torch.autograd.grad(eager(given).square().sum(), given)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-4)
