"""Loops whose steps read overlapping windows, leave gaps, or alternate: found, and the numbers are eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge import stats
from tests.bridge.capture.looped_networks import marks_of
from tests.bridge.compare import check_module

pytestmark = pytest.mark.usefixtures("few_operators")


class Cell(nn.Module):
    """``h -> tanh(h W + b + part)``, over parts of ``x`` [steps, batch, 3]."""

    def __init__(self):
        super().__init__()
        self.of_h, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def step(self, h, part):
        return torch.tanh(self.of_h(h) + part)


class Windows(Cell):
    def forward(self, x):
        h, made = torch.zeros_like(x[0]), []
        for step in range(len(x) - 2):
            h = self.step(h, x[step : step + 3].prod(0))
            made.append(h)
        return torch.stack(made)


class WindowsBack(Cell):
    def forward(self, x):
        h = torch.zeros_like(x[0])
        for step in reversed(range(1, len(x))):
            h = self.step(h, x[step - 1 : step + 1].cumsum(0)[-1])
        return h


class Patches(Cell):
    """Two parts of three."""

    def forward(self, x):
        h = torch.zeros_like(x[0])
        for step in range(0, len(x) - 1, 3):
            h = self.step(h, x[step : step + 2].sum(0))
        return h


class TurnByTurn(Cell):
    def forward(self, x):
        h = torch.zeros_like(x[0])
        for step in range(len(x)):
            h = self.step(h, x[step]) if step % 2 else self.norm(h - x[step])
        return h


class Truncated(Cell):
    """Backward goes through three steps at most."""

    def forward(self, x):
        h, loss = torch.zeros_like(x[0]), 0
        for step in range(len(x)):
            h = self.step(h.detach() if step % 3 == 0 else h, x[step])
            loss = loss + (h - x[step]).square().mean()
        return loss, h


class EverySecond(Cell):
    """The second loop reads every second step of the first, the last one first."""

    def forward(self, x):
        h, made = torch.zeros_like(x[0]), []
        for part in x:
            h = self.step(h, part)
            made.append(h)
        g = x[0]
        for step in range(len(made) - 1, -1, -2):
            g = torch.sigmoid(self.norm(g) * made[step])
        return g


class Unread(Cell):
    """The steps' writes are never read."""

    def forward(self, x):
        h, made = x[0], torch.zeros(x.shape)
        for step in reversed(range(len(x))):
            h = self.step(h * (step + 1), x[step])
            made[-1 - step].copy_(h)
        return h


def test_steps_that_write_what_nobody_reads_are_all_in_the_loop():
    module = check_module(Unread, lambda: torch.randn(21, 2, 3, requires_grad=True), calls=1)
    assert "loop of 21 steps" in str(stats(module).entries[0].forward)


@pytest.mark.parametrize(
    ("kind", "loops"),
    [(Windows, 1), (WindowsBack, 1), (Patches, 1), (TurnByTurn, 1), (Truncated, 1), (EverySecond, 2)],
)
def test_numbers_and_gradients_are_eagers(kind, loops):
    module = check_module(kind, lambda: torch.randn(21, 2, 3, requires_grad=True), calls=1)
    marks = marks_of(stats(module).entries[0].lowered)
    assert sum("part" in mark.name and mark.args[2] == 0 for mark in marks) == loops, marks
