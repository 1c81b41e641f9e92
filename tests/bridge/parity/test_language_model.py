"""Truncated back-propagation through time: a recurrent language model whose state goes from batch to batch, as eager's.

Sequences have several lengths, gradients are clipped, inputs are dropped; its cells are loops written by hand.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE, generators

pytestmark = pytest.mark.slow

STEPS, LENGTHS, BATCH, VOCABULARY, WIDTH = 50, (6, 9), 3, 11, 8


class Cell(nn.Module):
    """An LSTM's, its gates layer-normalized together."""

    def __init__(self):
        super().__init__()
        self.gates, self.norm = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.LayerNorm(4 * WIDTH)

    def forward(self, x, h, c):
        i, f, g, o = self.norm(self.gates(torch.cat([x, h], -1))).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class LanguageModel(nn.Module):
    """Tokens, the tokens after them, and the state of each layer -> the loss, and the state after the last token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1)
        self.cells, self.out = nn.ModuleList([Cell(), Cell()]), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, following, states):
        xs, after = self.drop(self.embedding(tokens)), []
        for cell, (h, c) in zip(self.cells, states, strict=True):
            made = torch.empty_like(xs)
            for step in range(xs.shape[1]):
                h, c = cell(xs[:, step], h, c)
                made[:, step] = h
            xs = made
            after.append((h, c))
        return F.cross_entropy(self.out(xs).flatten(0, 1), following.flatten()), after


def text():
    """Batches of alternating lengths: each row counts on, by its own increment, from the last batch."""
    steps, now = torch.arange(1, BATCH + 1).unsqueeze(1), torch.zeros(BATCH, 1, dtype=torch.long)
    for number in range(STEPS):
        tokens = (now + steps * torch.arange(LENGTHS[number % len(LENGTHS)] + 1)) % VOCABULARY
        now = tokens[:, -1:]
        yield tokens[:, :-1].contiguous().to(DEVICE), tokens[:, 1:].contiguous().to(DEVICE)


def losses(model):
    torch.manual_seed(3)
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.02), []
    zero = torch.zeros(BATCH, WIDTH, dtype=torch.float64, device=DEVICE)
    states = [(zero, zero)] * len(model.cells)
    for tokens, following in text():
        loss, states = model(tokens, following, states)
        states = [tuple(each.detach() for each in pair) for pair in states]
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found, generators()


def test_losses_of_truncated_back_propagation_are_eagers(monkeypatch):
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)  # also rolls up loops of so few operators
    torch.manual_seed(0)
    eager = LanguageModel().double().to(DEVICE)
    dispatched = copy.deepcopy(eager)
    state = torch.zeros(BATCH, WIDTH, dtype=torch.float64, device=DEVICE)
    add_tvm_dispatch(dispatched, (*next(text()), [(state, state)] * 2), on_miss="compile")
    (actual, drawn), (expected, drawn_by_eager) = losses(dispatched), losses(eager)
    assert expected[-2] < 0.8 * expected[0] and max(expected[1::2]) > 0.5, "nothing is learned, or nothing is clipped"
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)
    assert all(map(torch.equal, drawn, drawn_by_eager))
    counted = stats(dispatched)
    assert counted.hits == STEPS and len(counted.entries) == len(LENGTHS), counted
