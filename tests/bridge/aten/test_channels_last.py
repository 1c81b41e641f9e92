"""Convolutions in channels_last: eager's numbers, and and operators between two of them walk memory in its layout."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, lower, stats
from bridge.library import convolution
from tests.sampling import sampled


class Net(nn.Module):
    """A residual block, with a grouped and a depthwise convolution, followed by ``then``."""

    def __init__(self, then):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped, self.depthwise = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.then = then

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        return self.then(self.depthwise(self.grouped(y) * self.scale) + y)


class Branches(Net):
    """A map that two convolutions and a pool read: their gradients are added."""

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        return self.then(self.depthwise(y) + self.grouped(y) * self.scale + nn.functional.max_pool2d(y, 3, 1, 1))


class Concatenated(Net):
    """Concatenated maps, as in a dense block, cut in another place than where they meet."""

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        y = nn.functional.batch_norm(torch.cat((y, self.depthwise(y) * self.scale, y), 1), None, None, training=True)
        narrow, wide = y.split((5, 19), 1)
        return self.then(torch.cat((self.grouped(wide[:, 3:11]), narrow, wide[:, 11:, :, :]), 1))


class Sizes(Net):
    """Maps of other sizes and back: by averages, by interpolation, by a transposed convolution."""

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        half = nn.functional.avg_pool2d(self.depthwise(y) * self.scale, 2)
        fifths = nn.functional.adaptive_avg_pool2d(self.grouped(half), (2, 3))
        wide = nn.functional.interpolate(fifths * 2, (4, 5), mode="bilinear") + nn.functional.interpolate(half, (4, 5))
        return self.then(wide + nn.functional.conv_transpose2d(half, self.first.weight[:, :1], stride=2)[:, :, :4, :5])


class Before(Net):
    """A batch normalization of the argument, before any convolution."""

    def forward(self, x):
        y = nn.functional.batch_norm(x, None, None, training=True).relu()
        return self.then(self.depthwise(self.grouped(self.norm(self.first(y))) * self.scale) + x.sum())


class Grouped(Net):
    """Group norms: of the argument, between convolutions, of a copy in the other order, of one channel a group."""

    def forward(self, x):
        y = nn.functional.group_norm(x, 3) + nn.functional.group_norm(x, 1).tanh()
        y = nn.functional.silu(nn.functional.group_norm(self.first(y), 2, self.norm.weight, self.norm.bias))
        y = nn.functional.group_norm((self.grouped(y) * self.scale).contiguous(), 4) + y
        return self.then(self.depthwise(nn.functional.group_norm(y, 8)))


class Padded(Net):
    """Activations that stop gradients where they saturate, pads behind and before them, a negative pad."""

    def forward(self, x):
        y = nn.functional.pad(nn.functional.relu6(self.norm(self.first(x)) * 4), (0, 1, 0, 1))
        y = nn.functional.hardtanh(nn.functional.conv2d(y, self.grouped.weight, self.grouped.bias, groups=2), -1, 2)
        y = (
            nn.functional.pad(y.clamp(-0.5, 0.5), (1, -1, 2, 0), value=0.25) * self.scale
            + y[..., :1, :1].square().log1p()
        )
        return self.then(self.depthwise(nn.functional.pad(y, (-1, 0, -2, 0))))


class Permuted(nn.Module):
    """Batch normalizations of tensors with channels last, without a convolution."""

    def __init__(self, then):
        super().__init__()
        self.first, self.norm, self.then = nn.Linear(10, 8, bias=False), nn.BatchNorm1d(8), then

    def forward(self, x):
        y = self.first(x.movedim(1, 2))  # channels of the linear layer behind
        y = nn.functional.batch_norm(y.permute(0, 3, 1, 2), None, None, training=True).relu()
        return self.then(y + self.norm(y.flatten(2).mT.contiguous().mT).view_as(y))


THEN = {
    "returned": lambda y: y,
    "mean": lambda y: y.mean((2, 3)),
    "largest of channels": lambda y: y.amax(1, keepdim=True) - y.softmax(1),
    "a pool": lambda y: nn.functional.max_pool2d(y * y, 2, 1).sin(),
    "a pool's places": lambda y: nn.functional.max_pool2d(y, 2, 2, ceil_mode=True, return_indices=True)[0] - 1,
    "a map beside": lambda y: y * torch.arange(20.0, dtype=torch.float64).view(4, 5),
    "sum of rows": lambda y: y.sum(2) + y.sum(-1, keepdim=True).sum(2),
}


OTHERS = (Concatenated, Sizes, Before, Grouped, Padded, Permuted)


@pytest.mark.composes(
    "`channels_last`",
    "convolutions, pools, interpolations and all between them keep that order of memory; dimensions that vary do not",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize(
    ("net", "then"),
    sampled(
        [
            *((Net, then) for then in THEN),
            *((net, then) for net in (Branches, *OTHERS) for then in ("returned", "mean")),
        ],
        [
            *((Net, then) for then in ("largest of channels", "a pool's places")),
            *((net, "mean" if net in (Branches, Before) else "returned") for net in (Branches, *OTHERS)),
        ],
    ),
)
def test_numbers_are_eagers(net, then):
    torch.manual_seed(0)
    eager = net(THEN[then]).double().to(memory_format=torch.channels_last)
    module = copy.deepcopy(eager)
    x = torch.randn(2, 3, 8, 10, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    add_tvm_dispatch(module, x)
    results = []
    for each in (eager, module):
        y = each(x)
        leaves = [x, *each.parameters()]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves), *each.buffers()])
    assert stats(module).hits == 1 and results[0][0].stride() == results[1][0].stride()
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


class Nothing(Net):
    """Slices of zero channels: by themselves, under a weight, joined and beside others."""

    def __init__(self, then):
        super().__init__(then)
        self.none = nn.Parameter(torch.randn(0, 1, 1))

    def forward(self, x):
        y = self.then(self.norm(self.first(x)))
        none = y[:, :0]
        return none.flatten(2) * 2, none * self.none, none.sum((1, 2)), torch.cat((y, none), 1)


def test_maps_without_channels_are_eagers():
    torch.manual_seed(0)
    module = Nothing(torch.sin).to(memory_format=torch.channels_last)
    eager, x = copy.deepcopy(module), torch.randn(2, 3, 8, 10).contiguous(memory_format=torch.channels_last)
    add_tvm_dispatch(module, x)
    for expected, actual in zip(eager(x), module(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert stats(module).hits == 1


@pytest.mark.parametrize(
    "net", sampled([Net, Branches, Concatenated, Before, Grouped, Padded], lambda net: net is not Net)
)
def test_memory_is_walked_as_it_lies(net):
    """No kernel of the block sees channels in the second place."""
    module = net(THEN["mean"]).to(memory_format=torch.channels_last)
    lowered = lower(module, torch.randn(2, 3, 8, 10).contiguous(memory_format=torch.channels_last))
    planes = re.compile(r"R\.Tensor\(\(2, (\d{2}|[5-9]), 4, 5\)")
    for function in (lowered.forward, lowered.backward):
        lines = [line for line in str(function).splitlines() if planes.search(line.split("=")[0])]
        assert all("permute_dims" in line for line in lines)


@pytest.mark.parametrize("net", sampled([Net, Branches], [Branches]))
def test_convolutions_are_told_channels_last(net, monkeypatch):
    seen = []
    plain = convolution._convolution

    def watched(x, weight, *geometry):
        seen.append([each.is_contiguous(memory_format=torch.channels_last) for each in (x, weight)])
        return plain(x, weight, *geometry)

    monkeypatch.setattr(convolution, "_convolution", watched)
    module = net(THEN["mean"]).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 10).contiguous(memory_format=torch.channels_last)
    add_tvm_dispatch(module, x)
    seen.clear()
    module(x)
    assert seen[1:] == [[True, True]] * 2 and seen[0][1]


def test_a_batch_normalization_walks_what_it_is_given_as_it_lies():
    """Its channels are the last axis of memory: all sums are of columns, and nothing is stored in another order."""
    lowered = lower(Permuted(lambda y: y.mean((2, 3))), torch.randn(3, 4, 5, 10))
    sums = [line for line in str(lowered.forward).splitlines() if "R.mean(" in line]
    assert sums and all("axis=[0, 1, 2]" in line or "axis=[0, 1]" in line for line in sums[:-1])


def test_other_convolutions_stay():
    assert "convolution_last" not in str(lower(Net(THEN["mean"]), torch.randn(2, 3, 8, 10)).forward)


@pytest.mark.cpu("the processor's autocast")
def test_cast_weights_lie_as_convolutions_take_them(monkeypatch):
    """Under autocast, forward and backward: a convolution copies none of them into its order."""
    lies, plain = [], convolution._channels_last
    monkeypatch.setattr(
        convolution, "_channels_last", lambda w: lies.append(w.permute(0, 2, 3, 1).is_contiguous()) or plain(w)
    )
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 10).contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        add_tvm_dispatch(module, x)
        module(x).float().sum().backward()
    assert stats(module).hits == 1 and len(lies) >= 4 and all(lies)
