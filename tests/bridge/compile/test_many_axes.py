"""Tensors of more axes than a kernel has loops, permuted, repeated and cut: eager's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.bridge.compare import check_module
from tests.sampling import sampled, spread

NINE = (2,) * 9


def turned(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.dim())))


CASES = {
    "repeat": ((3, 2, 3, 5), lambda x: x.cumsum(0).repeat(2, 2, 2, 2)),
    "pointwise": (NINE, lambda x: turned(x).exp() + x),
    "one operand": (NINE, lambda x: turned(x).exp()),
    "reduction": (NINE, lambda x: turned(x).sum((0, 2, 4, 6, 8))),
    "softmax": (NINE, lambda x: turned(x).softmax(3)),
    "concat": (NINE, lambda x: torch.cat([turned(x), x.sin()], 4)),
    "product": (NINE, lambda x: turned(x) @ x),
    "cast": (NINE, lambda x: turned(x).float().double()),
    "slices": ((3,) * 8, lambda x: x.exp()[1:, :2, ::2, 1:, :2, ::2, 1:, :2].sum((1, 3))),
}


class ManyAxes(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return self.function(x) * self.scale


@pytest.mark.parametrize("name", sampled(CASES, spread(CASES)))
def test_more_axes_than_loops(name):
    shape, function = CASES[name]
    check_module(
        lambda: ManyAxes(function), lambda: torch.randn(shape, dtype=torch.float64, requires_grad=True), calls=1
    )
