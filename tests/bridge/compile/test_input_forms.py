"""Inputs in their slots' layouts: dense, or dense in another order of their axes, for any layout of the caller's."""

from __future__ import annotations

import itertools

import pytest
import torch

from bridge.base.devices import HOST
from bridge.compile.runtime.layout import InputForms, Register

SHAPE, ORDER = (2, 3, 4, 5), (0, 2, 3, 1)


@pytest.fixture
def forms():
    turned = tuple(SHAPE[axis] for axis in ORDER)
    return InputForms("f", [Register(0, "x", turned, "float32", order=ORDER), Register(1, "y", SHAPE, "float32")], HOST)


def in_all_orders():
    x = torch.arange(120.0).view(SHAPE)
    for order in itertools.permutations(range(4)):
        yield x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


def test_slots_have_the_numbers_in_their_order(forms):
    for x in in_all_orders():
        first, second = forms.dense([x, x])
        assert torch.equal(first, x.permute(ORDER)) and torch.equal(second, x)
        assert first.is_contiguous() and second.is_contiguous()


def test_what_lies_so_is_not_copied(forms):
    x, y = (torch.randn(SHAPE) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last)
    first, second = forms.dense([x, y])
    assert first.data_ptr() == x.data_ptr() and second is y
    assert forms.as_they_lie([x, y])[1] == ()


def test_equal_strides_lie_alike(forms):
    """A recording knows an input by its address and strides; inputs of too many strides are copied."""
    copied = 0
    for x in in_all_orders():
        given, strided = forms.as_they_lie([x, x])
        lies = dict(strided)
        for place, (ours, order) in enumerate(zip(given, (ORDER, range(4)), strict=True)):
            assert torch.equal(ours, x) and ours.permute(list(order)).is_contiguous() is (place not in lies)
        copied += given[0] is not x
    assert 0 < copied < 24


def test_a_shape_is_told_as_the_caller_has_it(forms):
    with pytest.raises(ValueError, match=r"\(9, 9\).*wanted \(2, 3, 4, 5\)"):
        forms.dense([torch.zeros(9, 9), torch.zeros(SHAPE)])
