"""Rolls and pads equal eager's, and become operators that compile well in both directions."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from bridge import add_tvm_dispatch, lower, stats
from bridge.compile import CallLibrary
from tests.bridge.compare import Function, check_module
from tests.sampling import sampled

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


PADS = {
    "behind two axes": ((0, 1, 0, 1), 0.0),
    "around": ((2, 1, 1, 3, 1, 0), 0.5),
    "one axis": ((0, 0, 2, 2), -1.5),
    "a cut and a pad": ((-1, 2, 1, -2), 0.25),
    "a cut": ((-1, -1), 3.0),
    "nothing": ((0, 0, 0, 0), 1.0),
    "the smallest": ((1, 1, 1, 1), float("-inf")),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(PADS, (torch.float64, torch.bfloat16)),
        lambda case: case[1] == torch.float64 or case[0] == "the smallest",
    ),
    ids=str,
)
def test_pads(name, dtype):
    widths, number = PADS[name]
    check_module(lambda: Function(lambda x: F.pad(x * 2, widths, value=number).relu() + 1), tensor, dtype=dtype)


def test_pads_of_other_types():
    def forward(x, i):
        return F.pad(x > 0, (1, 0, 2, 1), value=True), F.pad(i, (1, 1, 0, 1), value=2**40 + 1), F.pad(x, (1, 2)).sin()

    check_module(lambda: Function(forward), lambda: (tensor(), torch.arange(60).view(3, 5, 4)))


def test_a_pad_of_several_axes_is_one_step():
    """A tensor is written once, not once for each axis."""
    x = torch.randn(4, 16, 9, 7)
    module = Function(lambda x: F.avg_pool2d(F.pad(x.sin(), (1, 2, 0, 1)), 2))
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), module.function(x))
    (entry,) = stats(module).entries
    names = [step.name for step in entry.forward.steps if isinstance(step, CallLibrary)]
    assert names == ["pad", "avg_pool"]
