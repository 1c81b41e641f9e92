"""``torch.vmap`` inside forward: ensembles of functions and of modules, traced as operators on whole batches."""

import copy

import torch
from torch import nn
from torch.func import functional_call, vmap

from tests.bridge.compare import check_module


class Ensemble(nn.Module):
    """Members of one structure, run as one on their stacked parameters."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(3))
        self.skeleton = [copy.deepcopy(self.members[0]).to("meta")]

    def forward(self, x):
        named = [dict(member.named_parameters()) for member in self.members]
        stacked = {name: torch.stack([each[name] for each in named]) for name in named[0]}

        def member(parameters, x):
            return functional_call(self.skeleton[0], parameters, (x,))

        return vmap(member, in_dims=(0, None))(stacked, x)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 5, 4)), nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        return vmap(lambda weight, bias: torch.tanh(x @ weight.T + bias))(self.weight, self.bias)


def test_stacked_parameters_of_modules():
    check_module(Ensemble, lambda: torch.randn(6, 4), calls=1)


def test_parameters_that_are_stacked_already():
    check_module(Heads, lambda: torch.randn(6, 4), calls=1)


class WithNumbers(nn.Module):
    """Numbers in Python take part as tensors of no dimension, whatever the type of the other operand."""

    def forward(self, x):
        def row(r):
            return (r.sin() * 2 + 1) / 3 - r**2 + 1 / (r.abs() + 1.5) + (r > 0) * 3 + r.sum().int() * 0.5

        return vmap(row)(x), vmap(vmap(lambda r: 2 - r * 3))(x)


def test_numbers_beside_batched_tensors():
    check_module(WithNumbers, lambda: torch.randn(6, 4), calls=1)
