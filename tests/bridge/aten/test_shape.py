"""Tensors that are moved about: rolled and padded as eager's, and by what compiles well in both directions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bridge import lower
from tests.bridge.compare import Function, check_module

ROLLS = {
    "flat": (1,),
    "flat, around and around": (-131,),
    "back": (-3, 0),
    "past the end": (7, 1),
    "two axes": ((1, 2), (0, 1)),
    "an axis twice": ((-2, 9), (1, 1)),
    "all axes, from behind": ((2, -1, 1), (2, 0, -1)),
    "not at all": (0, 0),
}


def tensor():
    return torch.randn(3, 5, 4).requires_grad_()


@pytest.mark.parametrize("name", ROLLS)
def test_rolls(name):
    check_module(lambda: Function(lambda x: torch.roll(x * 2, *ROLLS[name]) * x), tensor)


@pytest.mark.parametrize("form", [(), (0, 4)], ids=["no axis", "no element"])
def test_rolls_of_nothing(form):
    check_module(lambda: Function(lambda x: torch.roll(x * 2, 3, 0 if form else ())), lambda: torch.randn(form))


def test_a_rolled_tensors_gradient_is_rolled_back():
    """No positions are read or added to."""
    lowered = lower(Function(lambda x: torch.roll(x.sin(), (-3, 2), (1, 2))), tensor())
    for function in (lowered.forward, lowered.backward):
        assert "concat" in str(function)
        assert not any(word in str(function) for word in ("library.index", "take", "scatter", "pad("))
