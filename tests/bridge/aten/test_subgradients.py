"""Where torch's versions differ in a subgradient, ours equals the installed torch's, or its kernel's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge.aten import activations, pointwise
from tests.bridge.compare import check_module

AT_BOUNDS = [-1.0, 2.0, 0.5, 0.0, -0.0, 3.0, -3.0, float("inf"), float("-inf"), float("nan")]


class Clamped(nn.Module):
    def __init__(self, lower, upper):
        super().__init__()
        self.bounds = lower, upper

    def forward(self, x):
        return x.clamp(*self.bounds)


class Larger(nn.Module):
    def forward(self, x):
        return torch.fmax(x, x.flip(0)), torch.fmin(x, x.detach())


def sample():
    return torch.tensor(AT_BOUNDS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bounds", [(-1, 2), (0.5, None), (None, 0.5), (2, -1)], ids=str)
def test_clamp_at_its_bounds(bounds):
    check_module(lambda: Clamped(*bounds), sample, calls=1)


def test_clamp_by_torchs_own_kernel_where_the_rule_is_unknown(monkeypatch):
    monkeypatch.setattr(pointwise, "clamp_at_bound", lambda: None)
    check_module(lambda: Clamped(-1, 2), sample, calls=1)


@pytest.mark.parametrize("first", [None, False])
def test_fmax_at_ties(monkeypatch, first):
    if first is not None:
        monkeypatch.setattr(pointwise, "fmax_prefers_first", lambda: first)
    check_module(Larger, sample, calls=1)


def test_what_autograd_is_asked_does_not_depend_on_the_modes_around_it():
    activations.clamp_at_bound.cache_clear()
    expected = activations.clamp_at_bound()
    activations.clamp_at_bound.cache_clear()
    with torch.inference_mode():
        assert activations.clamp_at_bound() == expected
