"""Gradients of a gather with one index in each row, as a loss has: a comparison in a kernel, nothing is scattered.

That they are right is the business of the generated test over all rules and of torch's own samples.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bridge import lower


class Gather(torch.nn.Module):
    def forward(self, x, index):
        return torch.exp(torch.gather(x, 1, index))


class Loss(torch.nn.Module):
    def forward(self, x, index):
        return F.cross_entropy(x, index[:, 0])


def operators(module, columns, count):
    x = torch.randn(5, columns, requires_grad=True, dtype=torch.float64)
    lowered = lower(module, (x, torch.randint(0, columns, (5, count))))
    return str(lowered.backward), lowered


@pytest.mark.parametrize("module", [Gather(), Loss()], ids=["gather", "cross-entropy"])
def test_one_index_in_a_row_is_compared(module):
    text, lowered = operators(module, 7, 1)
    assert "scatter" not in text and "R.equal" in text
    lowered.check()


def test_several_are_added_up():
    text, lowered = operators(Gather(), 3, 6)
    assert "scatter" in text
    lowered.check()
