"""The derivative of a library operator reads saved results in the shapes in which its formula saves them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.bridge.compare import check_module
from tests.device import DEVICE


class Inverse(nn.Module):
    def forward(self, x, inverted):
        return torch.linalg.tensorinv(x, inverted)


class Solution(nn.Module):
    def forward(self, a, b):
        return torch.linalg.tensorsolve(a, b)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE, requires_grad=True)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (Inverse, lambda: (numbers(24, 8, 3), 1)),
        (Inverse, lambda: (numbers(2, 3, 6), 2)),
        (Inverse, lambda: (numbers(6, 2, 3).transpose(1, 2), 1)),
        (Solution, lambda: (numbers(2, 3, 6), numbers(2, 3))),
        (Solution, lambda: (numbers(2, 3, 6, 1), numbers(2, 3))),
        (Solution, lambda: (numbers(6, 3, 2), numbers(6))),
    ],
)
def test_a_result_that_is_a_reshape_of_a_saved_tensor(module, arguments):
    check_module(module, arguments)
