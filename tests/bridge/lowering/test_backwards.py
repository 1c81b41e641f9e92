"""Backwards for calls in which some outputs get no gradient: from the existing one, or from the forward again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm_ffi import structural_equal

import autodiff
from bridge import add_tvm_dispatch, lower, stats
from tests.device import DEVICE
from tests.sampling import sampled


class Classifier(nn.Module):
    """A loss, its logits, and hidden states with other users: as HuggingFace's models with labels."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, 0.1, batch_first=True)
        self.head = nn.Linear(24, 9)

    def forward(self, ids, labels):
        hidden = self.layer(self.words(ids))
        logits = self.head(hidden)
        return F.cross_entropy(logits.view(-1, 9), labels.view(-1)), logits, hidden.tanh()


class Chosen(nn.Module):
    """Its second output goes through an operator of a library, which has no rule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        product = x @ self.weight
        return product.square().mean(), torch.linalg.svdvals(product)


def call():
    ids = torch.randint(50, (3, 7), device=DEVICE)
    return ids, torch.randint(9, (3, 7), device=DEVICE)


@pytest.mark.parametrize("outputs", sampled([((0,),), ((0, 1),), ((0, 2),)], [(0,), (0, 2)]), ids=str)
def test_it_is_the_backward_of_these_outputs_alone(outputs):
    lowered = lower(Classifier().to(DEVICE), call())
    gradients = lowered.gradients_for(outputs)
    rebuilt = lowered._rebuilt_backward(outputs, gradients)
    assert lowered.backward_for(outputs) is not lowered.backward
    assert structural_equal(lowered.backward_for(outputs), rebuilt)
    assert structural_equal(lowered._narrowed_backward(outputs, gradients), rebuilt)


def test_the_forward_is_differentiated_once(monkeypatch):
    calls = []
    whole = autodiff.differentiate
    monkeypatch.setattr(autodiff, "differentiate", lambda *args: calls.append(args[1]) or whole(*args))
    lowered = lower(Classifier().to(DEVICE), call())
    assert lowered.expected == (0,) and lowered.expected_backward is not lowered.backward
    assert calls == [(0, 1, 2)]


def test_what_has_no_rule_is_differentiated_again():
    module = Chosen().to(DEVICE)
    lowered = lower(module, torch.randn(6, 6, device=DEVICE))
    assert lowered._narrowed_backward((0,), lowered.gradients_for((0,))) is None
    assert len(lowered.expected_backward.params) == len(lowered.backward.params) - 1


@pytest.mark.parametrize(
    "used", sampled([((0,),), ((1,),), ((2,),), ((0, 2),), ((0, 1, 2),)], [(0,), (2,), (0, 1, 2)]), ids=str
)
def test_gradients_are_eagers(used):
    torch.manual_seed(0)
    eager = Classifier().double().to(DEVICE)
    ours = add_tvm_dispatch(copy.deepcopy(eager), call())
    given = call()
    for module in (eager, ours):
        torch.manual_seed(1)
        outputs = module(*given)
        sum(outputs[index].sin().sum() for index in used).backward()
    assert not stats(ours).misses
    for (name, theirs), found in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if theirs.grad is None:
            assert found.grad is None, name
        else:
            torch.testing.assert_close(
                found.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
