"""``copy_`` of numbers of another type or shape into a buffer: the buffer keeps its type and shape, as in eager."""

import itertools

import pytest
import torch
from torch import nn

from tests.bridge.compare import check_module
from tests.sampling import sampled


class Keeps(nn.Module):
    def __init__(self, dtype, given):
        super().__init__()
        self.linear, self.given = nn.Linear(4, 4), given
        self.register_buffer("kept", torch.ones(4, dtype=dtype))

    def forward(self, x):
        y = self.linear(x)
        self.kept.copy_(self.given(5 * y.detach()))
        return y * self.kept


GIVEN = {
    "integers": lambda y: y.sum(0).long(),
    "a number": lambda y: y.mean(),
    "small integers": lambda y: y[0].round().short(),
}


@pytest.mark.parametrize(
    ("given", "dtype"),
    sampled(
        itertools.product(GIVEN, (torch.float64, torch.int32, torch.bool)),
        [("integers", torch.bool), ("a number", torch.int32), ("small integers", torch.float64)],
    ),
    ids=str,
)
def test_the_buffer_keeps_its_form(given, dtype):
    check_module(lambda: Keeps(dtype, GIVEN[given]), lambda: torch.randn(5, 4), calls=1)
