"""Works: tasks of a process while the disk cache fails → the bits of all its results.

Each adds a dispatch and makes a training step, so that it reads and writes every kind of file of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import bridge
from tests.bridge.artifact.count_builds import Block, digest


class Cell(nn.Module):
    """A loop, which becomes one step of the program."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        for part in x.unbind(1):
            h = self.cell(part, h)
        return h


class Reading(nn.Module):
    """Branches on numbers of an argument and of a parameter, in eager alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden = nn.functional.dropout(self.linear(x), 0.3)
        hidden = hidden * 2 if self.linear.weight[0, 0] > -1 else hidden
        return hidden if torch.compiler.is_compiling() or not (x > -8).all() else hidden.cos()


def step(module: nn.Module, x: torch.Tensor) -> str:
    """The bits of a step: the output, all gradients, buffers, the generator afterwards."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    if not bridge.stats(module).hits:
        raise RuntimeError(f"not dispatched: {bridge.stats(module)}")
    draws = torch.rand(3, device=x.device)
    left = [y, x.grad, *(each.grad for each in module.parameters()), *module.buffers(), draws]
    return digest(each.cpu() for each in left)


def plain(folder: Path) -> str:
    """Products, reductions, a mask, a buffer."""
    torch.manual_seed(0)
    module, x = Block(), torch.randn(48, 64)
    return step(bridge.add_tvm_dispatch(module, x.clone().requires_grad_()), x)


def looped(folder: Path) -> str:
    """A recurrent cell."""
    torch.manual_seed(0)
    module, x = Cell(), torch.randn(3, 6, 8)
    return step(bridge.add_tvm_dispatch(module, x.clone().requires_grad_()), x)


def reading(folder: Path) -> str:
    """A forward that branches on numbers and on ``is_compiling()``: a lowering with its scalar guards."""
    torch.manual_seed(0)
    module, x = Reading(), torch.randn(3, 8)
    return step(bridge.add_tvm_dispatch(module, x.clone().requires_grad_()), x)


def on_gpu(folder: Path) -> str:
    """As :func:`plain` on a GPU, whose lowering and cubins are kept."""
    torch.manual_seed(0)
    module, x = Block().cuda(), torch.randn(48, 64).cuda()
    return step(bridge.add_tvm_dispatch(module, x.clone().requires_grad_()), x)


GPU = "gpu"
WORKS: dict[str, Callable[[Path], str]] = {"plain": plain, "looped": looped, "reading": reading}
WORKS[GPU] = on_gpu
