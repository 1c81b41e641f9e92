"""Dictionaries that count their writes: the guards' short cut, and the guards without it."""

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.state import write_counts


@pytest.fixture(params=["counted", "not counted"])
def counting(request, monkeypatch):
    if request.param == "not counted":
        monkeypatch.setattr(write_counts, "write_counter", lambda: None)
    return request.param


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.options = {"scale": 2.0}

    def forward(self, x):
        return self.layers(x) * self.options["scale"]


def test_a_count_that_misses_a_write_is_not_used():
    assert not write_counts._is_exact(len)
    assert not write_counts._is_exact(lambda held: 0)
    assert not write_counts._is_exact(lambda held: hash(str(held)))  # the same again after a write of the same


def test_every_write_is_seen_whatever_the_guards_have_to_go_by(counting):
    module = Net()
    x = torch.ones(4, 6)
    add_tvm_dispatch(module, x)
    guard = stats(module).entries[0].guard

    def dispatched() -> bool:
        return guard.check(module, (x,), {}) is not None

    linear, norm = module.layers[0], module.layers[1]
    weight, scale, momentum = linear.weight, module.options["scale"], norm.momentum
    assert dispatched() and dispatched()
    norm.momentum = 0.5
    assert not dispatched()
    norm.momentum = momentum
    module.eval()
    assert not dispatched()
    module.train()
    assert dispatched()
    linear.weight = nn.Parameter(torch.ones(6, 6))
    assert dispatched()
    linear.weight = nn.Parameter(torch.ones(6, 6), requires_grad=False)
    assert not dispatched()
    linear._parameters["weight"] = weight
    weight.requires_grad_(False)
    assert not dispatched()
    weight.requires_grad_(True)
    module.options["scale"] = 3.0
    assert not dispatched()
    module.options["scale"] = scale
    module.layers.append(nn.Tanh())
    assert not dispatched()
    del module.layers[3]
    handle = norm.register_forward_hook(lambda *_: None)
    assert not dispatched()
    handle.remove()
    module.layers[2].register_buffer("more", torch.ones(1))
    assert not dispatched()
    del module.layers[2].more
    assert dispatched() and dispatched()
