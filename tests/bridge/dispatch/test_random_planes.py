"""Random modules over planes and volumes, in channels_last or not, recorded: eager's numbers, and its strides."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Function
from tests.bridge.dispatch.test_orders import agree, step
from tests.device import DEVICE
from tests.sampling import sampled

LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
CALLS = 7
SEEDS = 40
ALWAYS = (1, 4, 12, 16, 18, 21, 24, 26, 34, 39)
"""Every layer and function, every kind of result, planes and volumes, module and input in either order."""

pytestmark = pytest.mark.usefixtures("recorder_on_the_host")


class Scale(nn.Module):
    """A parameter for each channel."""

    def __init__(self, *shape):
        super().__init__()
        self.by = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x * self.by


FUNCTIONS = (
    lambda x: x.flip(2),
    lambda x: torch.cat([x, torch.tanh(x)], 1),
    lambda x: x + torch.sigmoid(x),
    torch.relu,
    nn.functional.silu,
)


def layer(draw, rank, channels):
    """A random layer for so many channels, and its number of output channels."""
    conv, transposed = ((nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d))[rank - 2]
    out, size = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 3])
    match draw.choice("convolution convolution depthwise transposed norm pool average scale function function".split()):
        case "convolution":
            step, border = draw.choice([1, 2]), draw.choice([0, 1])
            return conv(channels, out, size, step, border, bias=draw.random() < 0.7), out
        case "depthwise":
            return conv(channels, channels, 3, padding=1, groups=channels), channels
        case "transposed":
            return transposed(channels, out, size, draw.choice([1, 2])), out
        case "norm":
            return (nn.BatchNorm2d, nn.BatchNorm3d)[rank - 2](channels), channels
        case "pool" if rank == 2:
            return nn.MaxPool2d(2, ceil_mode=True), channels
        case "average" if rank == 2:
            return nn.AvgPool2d(2, ceil_mode=True), channels
        case "function":
            function = draw.choice(FUNCTIONS)
            return Function(function), channels * (2 if function is FUNCTIONS[1] else 1)
        case _:
            return Scale(1, channels, *[1] * rank), channels


class Net(nn.Module):
    """Layers one after another; returns their result, its means, or the result beside the input or a weight."""

    def __init__(self, draw, rank, channels):
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(draw.randrange(1, 6)):
            made, channels = layer(draw, rank, channels)
            self.layers.append(made)
        self.returns = draw.choice(["alone", "means", "with its input", "with a weight"])

    def forward(self, x):
        y = self.layers(x)
        match self.returns:
            case "means":
                return y.mean((2, 3))
            case "with its input":
                return y, 2 * x
            case "with a weight":
                return y, next((2 * each for each in self.parameters() if each.ndim > 3), y.sum())
        return y


def drawn(seed):
    """A module and an input that eager takes."""
    draw = random.Random(seed)
    while True:
        torch.manual_seed(seed)
        rank, channels = draw.choice([2, 2, 2, 2, 3]), draw.choice([1, 2, 3, 4, 8])
        x = torch.randn(draw.choice([1, 2, 3]), channels, *(draw.choice([4, 5, 6, 8]) for _ in range(rank)))
        module, x = Net(draw, rank, channels).double().to(DEVICE), x.double().to(DEVICE)
        if draw.random() < 0.85:
            module = module.to(memory_format=LAST[rank])
        if draw.random() < 0.8:
            x = x.contiguous(memory_format=LAST[rank])
        x.requires_grad_(draw.random() < 0.6)
        try:
            step(copy.deepcopy(module), x)
        except (RuntimeError, ValueError):  # windows that are larger than the plane
            continue
        return module, x


@pytest.mark.parametrize("seed", sampled(range(SEEDS), ALWAYS))
def test_numbers_and_strides_are_eagers(seed):
    eager, x = drawn(seed)
    ours = add_tvm_dispatch(copy.deepcopy(eager), x, cuda_graphs=True)
    for _ in range(CALLS):
        with torch.no_grad():
            x.normal_()
        agree(ours, eager, x)
    counted = stats(ours)
    assert counted.hits == CALLS and counted.graphs.replays, counted
