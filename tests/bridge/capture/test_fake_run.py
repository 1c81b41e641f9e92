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


@pytest.mark.parametrize("enabled", [True, False])
def test_under_autocast_a_second_run_casts_as_the_first(enabled):
    """Autocast keeps casts of parameters until its outermost context is left, those of a context inside, too."""

    class Casts(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    module, x = Casts(3, 3), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        first = fake_run(module, *module_tensors(module), (x,), {})
        second = fake_run(module, *module_tensors(module), (x,), {}, earlier=first)
    assert second.observation.trace == first.observation.trace is not None
    outside = [fake_run(module, *module_tensors(module), (x,), {}, earlier=first) for _ in range(2)]
    assert outside[0].tensors is outside[1].tensors is first.tensors
    assert outside[0].observation.trace == outside[1].observation.trace is not None
