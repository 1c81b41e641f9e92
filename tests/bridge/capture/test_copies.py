"""``copy_`` of numbers of another type or shape into a buffer: the buffer keeps its form, as in eager."""

import pytest
import torch
from torch import nn

from tests.bridge.compare import check_module


class Keeps(nn.Module):
    def __init__(self, dtype, given):
        super().__init__()
        self.linear, self.given = nn.Linear(4, 4), given
        self.register_buffer("kept", torch.ones(4, dtype=dtype))

    def forward(self, x):
        y = self.linear(x)
        self.kept.copy_(self.given(5 * y.detach()))
        return y * self.kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
@pytest.mark.parametrize("given", [lambda y: y.sum(0).long(), lambda y: y.mean(), lambda y: y[0].round().short()])
def test_the_buffer_keeps_its_form(dtype, given):
    check_module(lambda: Keeps(dtype, given), lambda: torch.randn(5, 4), calls=1)
