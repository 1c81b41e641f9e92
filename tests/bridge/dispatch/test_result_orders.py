"""Outputs in another memory layout in eager: the program writes that layout, and users may write into them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.dispatch.call_steps import Relayout

pytestmark = [
    pytest.mark.cpu("on a GPU results are laid out after the program"),
    pytest.mark.usefixtures("lowered_once"),
]


class Turned(nn.Module):
    """Computed dense, then transposed as a view: nothing is copied."""

    def forward(self, x):
        return (x.exp() * 2).transpose(0, 1)


class OfATurned(nn.Module):
    """Computed from a transposed view: eager's result has the view's layout, and the backward reads it."""

    def forward(self, x):
        return x.transpose(0, 2).sigmoid()


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x[None].to(memory_format=torch.channels_last)).relu()


class Twice(nn.Module):
    """One value in two orders, and a result that is another's part."""

    def forward(self, x):
        y = x.tanh()
        return y.transpose(1, 2).contiguous(), (y + 0).transpose(1, 2), y[:, :2].transpose(0, 1).clone()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x)


MODULES = [Turned, OfATurned, ChannelsLast, Twice, Recurrent]


def outputs(module, x):
    made = module(x)
    return list(made) if isinstance(made, tuple) else [made]


def dispatched(kind, **options):
    torch.manual_seed(0)
    module, x = kind(), torch.randn(5, 6, 8, requires_grad=True)
    eager = copy.deepcopy(module)
    return add_tvm_dispatch(module, x, **options), eager, x


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("freeze", [False, True])
def test_strides_and_numbers_are_eagers(kind, freeze):
    if freeze:
        with torch.no_grad():
            module, eager, x = dispatched(kind, freeze=True)
            pairs = zip(outputs(module, x), outputs(eager, x), strict=True)
    else:
        module, eager, x = dispatched(kind)
        pairs = zip(outputs(module, x), outputs(eager, x), strict=True)
    for ours, theirs in pairs:
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert stats(module).hits == 1


@pytest.mark.parametrize("kind", [Turned, OfATurned, ChannelsLast])
def test_the_program_writes_them(kind):
    module, _, x = dispatched(kind)
    module(x)
    (entry,) = stats(module).entries
    assert not any(isinstance(step, Relayout) for step in entry.steps)


def test_what_is_turned_is_not_copied():
    module, _, x = dispatched(Turned)
    module(x)
    (entry,) = stats(module).entries
    assert [step.name for step in entry.forward.steps][1:] == ["as_strided"]


@pytest.mark.parametrize("kind", MODULES)
def test_results_may_be_written_into(kind):
    """Where eager allows it; where it does not, for its backward reads them, ours may read something else."""
    module, eager, x = dispatched(kind)

    def gradients(each, place, in_place):
        each.zero_grad()
        x.grad = None
        made = outputs(each, x)
        made[place] = made[place].mul_(3) if in_place else made[place] * 3
        sum((one * one).sum() for one in made).backward()
        return [*made, x.grad, *(parameter.grad for parameter in each.parameters())]

    for place in range(len(outputs(eager, x))):
        wanted = gradients(eager, place, in_place=False)
        try:
            found = gradients(module, place, in_place=True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(eager, place, in_place=True)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
