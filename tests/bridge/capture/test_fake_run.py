"""A second fake run takes the fake tensors of the first, unless that has changed one of them."""

import pytest
import torch
from torch import nn

from bridge.capture import fake_run
from bridge.state import module_tensors


class Writes(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class Detaches(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "again"), [(lambda: nn.Linear(3, 3), True), (Writes, False), (lambda: Detaches(3, 3), False)]
)
def test_tensors_that_a_run_left_alone_serve_again(make, again):
    module, x = make(), torch.randn(2, 3)
    first = fake_run(module, *module_tensors(module), (x,), {})
    second = fake_run(module, *module_tensors(module), (x,), {}, earlier=first)
    assert (second.tensors is first.tensors) == again
    assert second.observation.trace == first.observation.trace
