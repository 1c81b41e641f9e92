"""``examine(compare=True)``: advice for a module that cannot be dispatched whole."""

import copy

import pytest
import torch
from torch import nn

from bridge import examine, stats
from bridge.ways import Way, quickest


class Sorted(nn.Module):
    """NumPy between two layers."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 4)

    def forward(self, x):
        y = self.before(x)
        order = torch.from_numpy(y[:, 0].detach().cpu().numpy().argsort())
        return self.after(y[order])


def test_both_ways_are_tried_and_one_is_named():
    torch.manual_seed(0)
    module, x = Sorted(), torch.randn(6, 4)
    state, before = torch.get_rng_state(), copy.deepcopy(module.state_dict())
    found = examine(module, x, compare=True)
    parts, compiled = found.ways
    assert "whole=False" in parts.code and "2 parts" in parts.told and parts.ratio > 0
    assert "torch.compile" in compiled.code and compiled.ratio > 0 and "graphs" in compiled.told
    assert quickest(found.ways) in str(found) and str(parts) in str(found)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(now, before[name]) for name, now in module.state_dict().items())
    assert all(each.grad is None for each in module.parameters())
    with pytest.raises(ValueError, match="not dispatched"):
        stats(module)


def test_it_is_offered_where_it_was_not_asked_for():
    found = examine(Sorted(), torch.randn(6, 4))
    assert not found.ways and "compare=True" in str(found)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((0.7, 0.9), "quicker for this sample: parts"),
        ((0.9, 0.7), "quicker for this sample: compiled"),
        ((0.8, 0.81), "about as quick"),
        ((1.2, 0.99), "neither"),
        ((None, 0.5), "compiled"),
        ((None, None), "neither"),
    ],
)
def test_the_quickest_is_named_where_it_is_quicker(ratios, words):
    assert words in quickest([Way(name, ratio, "") for name, ratio in zip(("parts", "compiled"), ratios, strict=True)])
