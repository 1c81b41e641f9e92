"""Flags that are the same whatever is drawn: layers that are never, or always, skipped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, lower, stats
from tests.sampling import sampled

FLAGS = {
    "never less": lambda: torch.rand([]) < 0.0,
    "never less, a copy": lambda: torch.rand(1).detach().clone() < -1,
    "always less": lambda: torch.rand([]) < 1.0,
    "less than what rounds to 1": lambda: torch.rand([]) < 1 - 1e-12,
    "never at most": lambda: torch.rand([]) <= -0.5,
    "always at most": lambda: torch.rand([], dtype=torch.float64) <= 1,
    "always at least": lambda: torch.rand([]) >= 0,
    "never at least": lambda: torch.rand([]) >= 1,
    "always more": lambda: torch.rand([]) > -0.25,
    "never more": lambda: torch.rand([]) > 1.5,
    "never less than no number": lambda: torch.rand([]) < float("nan"),
}
OPEN = {
    "less": lambda: torch.rand([]) < 0.5,
    "at most 0": lambda: torch.rand([]) <= 0,
    "at most what rounds to 0": lambda: torch.rand([]) <= -1e-300,
    "more than 0": lambda: torch.rand([]) > 0,
    "of half precision": lambda: torch.rand([], dtype=torch.bfloat16) < 1.0,
    "of another draw": lambda: torch.randn([]) < 0.0,
}


class Skips(nn.Module):
    """Layers before which a coin is thrown, as where transformers drops layers."""

    def __init__(self, flag):
        super().__init__()
        self.layers, self.flag = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), flag

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.flag():
                continue
            x = torch.dropout(layer(x), 0.5, self.training)
        return x


def checks(module, x):
    """Whether the forward has a scalar guard, and whether it draws the coin."""
    lowered = lower(module, x)
    return "where" in str(lowered["imported"].function), "draw_0" in str(lowered.forward)


ALIKE = ("never less", "never at most", "never at least", "always more")
"""The others have each comparison, each answer, a copy, rounding and a type of more digits."""


@pytest.mark.parametrize("name", sampled(FLAGS, lambda name: name not in ALIKE))
def test_nothing_is_checked_and_generators_are_eagers(name):
    torch.manual_seed(0)
    eager = Skips(FLAGS[name])
    ours, x = copy.deepcopy(eager), torch.randn(3, 4).requires_grad_()
    assert checks(ours, x) == (False, False)
    add_tvm_dispatch(ours, x)
    for seed in range(3):
        results = []
        for module in (eager, ours):
            torch.manual_seed(seed)
            y = module(x)
            results.append((y, torch.rand(2), torch.autograd.grad(y.sum(), x)[0] if y is not x else x))
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
    assert stats(ours).hits == 3 and not stats(ours).misses


@pytest.mark.parametrize("name", OPEN)
def test_other_flags_are_checked(name):
    torch.manual_seed(1)
    assert checks(Skips(OPEN[name]), torch.randn(3, 4)) == (True, True)
