"""Training loops with recorded graphs beside eager: two forwards before a backward, accumulation, and others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge import add_tvm_dispatch, stats
from bridge.base.generators import default_generator
from tests.device import DEVICE

_WIDTH = 24


class _Layer(nn.Module):
    """Products, a norm, two dropouts, a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 96), nn.Linear(96, _WIDTH)
        self.register_buffer("mean", torch.zeros(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + F.dropout(self.down(h), 0.1, self.training)


class Pair:
    """A dispatched module and eager's, fed alike; numbers, gradients and the generator are compared after each step.

    ``single``: the other one is dispatched as well, without graphs: bits are compared.
    """

    def __init__(
        self,
        mode: object = True,
        rows: int = 7,
        dtype: torch.dtype = torch.float64,
        dynamic: bool = False,
        make: Callable[[], nn.Module] = _Layer,
        single: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.ours = make().to(DEVICE, dtype)
        self.eager = copy.deepcopy(self.ours)
        self.rows, self.dtype = rows, dtype
        self.tolerance = 0.0 if single else 1e-10
        shapes = {"dynamic_shapes": ({0: torch.export.Dim("rows", min=2)},)} if dynamic else {}
        for module, graphs in [(self.ours, mode), (self.eager, False)][: 1 + single]:
            self.dispatch(module, graphs, **shapes)
            if not dynamic:
                module.eval()
                with torch.no_grad():
                    self.dispatch(module, graphs)
                module.train()
        self.optimizers = [torch.optim.SGD(each.parameters(), 1e-4, momentum=0.9) for each in self.both]

    def dispatch(self, module: nn.Module, mode: object, **given: object) -> None:
        """Dispatches one of both in its present state."""
        add_tvm_dispatch(module, self.batch(0), cuda_graphs=mode, on_miss="error", **given)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.ours, self.eager

    @property
    def graphs(self):
        return stats(self.ours).graphs

    @torch.no_grad()
    def align(self) -> None:
        """Gives ours eager's numbers, in place: roundings of one test do not grow in the next."""
        for mine, theirs in zip(*(each.state_dict().values() for each in self.both), strict=True):
            mine.copy_(theirs)
        self.optimizers = [torch.optim.SGD(each.parameters(), 1e-4, momentum=0.9) for each in self.both]

    def batch(self, seed: int, rows: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows or self.rows, _WIDTH, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(DEVICE, self.dtype).requires_grad_()

    def step(self, seed: int, work: Callable) -> None:
        """``work(pair, module, optimizer)`` for both, from one state of the generator."""
        made, states = [], []
        for module, optimizer in zip(self.both, self.optimizers, strict=True):
            torch.manual_seed(seed)
            found = work(self, module, optimizer)
            states.append(default_generator(DEVICE).get_state())
            made.append([*found, *module.state_dict().values(), *(each.grad for each in module.parameters())])
        assert torch.equal(*states)
        for ours, theirs in zip(*made, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=self.tolerance, atol=self.tolerance)


def plain(pair, module, optimizer, rows=None):
    optimizer.zero_grad()
    x = pair.batch(0, rows)
    y = module(x)
    y.square().sum().backward()
    optimizer.step()
    return [y.detach(), x.grad]


def gradients_set_to_zero(pair, module, optimizer):
    optimizer.zero_grad(set_to_none=False)
    return plain(pair, module, optimizer)


def two_forwards_before_a_backward(pair, module, optimizer):
    optimizer.zero_grad()
    a, b = pair.batch(1), pair.batch(2)
    one, other = module(a), module(b)
    (one.square().sum() + other.sum()).backward()
    optimizer.step()
    return [one.detach(), other.detach(), a.grad, b.grad]


def backwards_in_the_order_of_forwards(pair, module, optimizer):
    a, b = pair.batch(3), pair.batch(4)
    one, other = module(a), module(b)
    one.square().sum().backward()
    other.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [a.grad, b.grad]


def accumulation(pair, module, optimizer):
    optimizer.zero_grad()
    for part in range(3):
        module(pair.batch(part)).square().sum().backward()
    optimizer.step()
    return []


def evaluation(pair, module, optimizer):
    module.eval()
    with torch.no_grad():
        y = module(pair.batch(5))
    module.train()
    return [y]


def checkpointing(pair, module, optimizer):
    optimizer.zero_grad()
    x = pair.batch(6)
    y = checkpoint(module, x, use_reentrant=False)
    y.square().sum().backward()
    optimizer.step()
    return [y.detach(), x.grad]


def backward_twice(pair, module, optimizer):
    optimizer.zero_grad()
    loss = module(pair.batch(7)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return []


LOOPS = [
    *(plain, gradients_set_to_zero, two_forwards_before_a_backward, backwards_in_the_order_of_forwards),
    *(accumulation, evaluation, checkpointing, backward_twice),
]
