"""Loops whose steps are not proven to be equal: they are traced as they are, and the numbers are eager's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, lower, stats
from bridge.capture.loops import prove
from tests.bridge.capture.looped_networks import marks_of
from tests.bridge.compare import check_module
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("few_operators", "few_steps")

STEPS = 4


@pytest.fixture
def few_steps(monkeypatch):
    """Equal steps are a loop even if they are few."""
    monkeypatch.setattr(prove, "LEAST_STEPS", 3)


class Reads(nn.Module):
    def forward(self, x):
        h = x[0]
        for part in x:
            h = torch.tanh(h + part) if h.sum().item() > -1e9 else h
        return h


class ReadsBack(nn.Module):
    """The state is read back from the written tensor, through views that are taken before the next write."""

    def forward(self, x):
        out = torch.zeros_like(x)
        for step in range(1, len(x)):
            out[step] = torch.tanh(out[step - 1] + x[step])
        return out


class WritesOfAView(nn.Module):
    """Another tensor sees the writes."""

    def forward(self, x):
        out = torch.zeros_like(x)
        view, h = out[1:], x[0]
        for step in range(len(x)):
            h = torch.tanh(h + x[step])
            out[step] = h
        return view * 2


class WritesTwice(nn.Module):
    """A row is written again."""

    def forward(self, x):
        out, h = torch.zeros_like(x), x[0]
        for step in range(len(x)):
            h = torch.tanh(h + x[step])
            out[step // 2] = h
        return out


class CopiesOfAView(nn.Module):
    """Writes through views that are read before, after, or kept."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        out, h, kept = torch.zeros_like(x), x[0], []
        for step in range(len(x)):
            h = torch.tanh(h + x[step])
            view = out[step]
            if self.way == "before":
                h = h + view
            view.copy_(h)
            if self.way == "after":
                h = h + view
            if self.way == "kept":
                kept.append(view)
        return out, sum(kept)


class SavedThenWritten(nn.Module):
    """Autograd has saved a value of the tensor that is written."""

    def forward(self, x):
        out, h = torch.zeros_like(x), x[0]
        for step in range(len(x)):
            h = torch.tanh(h + x[step] + out.detach().sum())
            out[step] = h
        return out


class WritesWhatAViewSees(nn.Module):
    """An earlier view sees the write in place: the input's own parts."""

    def __init__(self, of_input):
        super().__init__()
        self.of_input = of_input

    def forward(self, x):
        x, h = x * 1, x[0]
        for part in [x.select(0, step) for step in range(len(x))]:
            made = part if self.of_input else h + part
            view = made[:1]
            made.mul_(0.5)
            h = made + view
        return h, x


class OwnWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(5))

    def forward(self, x):
        h = x[0]
        for part, weight in zip(x, self.weights, strict=False):
            h = torch.tanh(h * weight + part)
        return h


class OtherPowers(nn.Module):
    def forward(self, x):
        h = x[0]
        for step, part in enumerate(x):
            h = torch.tanh((h * h + 1) ** (0.5 * step) + part)
        return h


class SkipsOne(nn.Module):
    def forward(self, x):
        h = x[0]
        for step in (0, 2, 1, 3):
            h = torch.tanh(h + x[step])
        return h


class NoGradLater(nn.Module):
    def forward(self, x):
        h = x[0]
        for step in range(len(x)):
            with torch.set_grad_enabled(step % 2 == 0):
                h = torch.tanh(h + x[step])
        return h


class DropsBySteps(nn.Module):
    def forward(self, x):
        h = x[0]
        for step, part in enumerate(x):
            h = torch.tanh(F.dropout(h, 0.1 * (1 + step % 2), self.training) + part)
        return h


class DropsInPlace(nn.Module):
    def forward(self, x):
        h = x[0]
        for part in x:
            h = torch.tanh(F.dropout(h + part, 0.3, self.training, inplace=True))
        return h


class ClampsUnseen(nn.Module):
    """``gaussian_nll_loss`` clamps the variance unseen by autograd, with a gradient of 1."""

    def forward(self, x):
        h, total = x[0], 0.0
        for part in x:
            total = total + F.gaussian_nll_loss(part, h, h.sigmoid(), eps=0.6)
            h = torch.tanh(h + part)
        return total


class Noisy(nn.Module):
    def forward(self, x):
        h = x[0]
        for part in x:
            h = torch.tanh(h + part * torch.rand_like(part))
        return h


class KeepsElsewhere(nn.Module):
    """A number from numpy, which no operator computes."""

    def forward(self, x):
        h, first = x[0], float(x.detach().numpy()[0, 0, 0])
        for part in x:
            h = torch.tanh(h * first + part)
        return h


class Proven(nn.Module):
    def forward(self, x):
        h = x[0]
        for part in x:
            h = torch.tanh(h + part)
        return h


def test_as_many_steps_that_are_equal_are_a_loop():
    assert marks_of(lower(Proven(), torch.randn(STEPS, 2, 3, requires_grad=True)))


KINDS = [
    *(Reads, ReadsBack, WritesOfAView, WritesTwice, SavedThenWritten),
    *(OwnWeights, OtherPowers, SkipsOne, NoGradLater),
    *(DropsBySteps, DropsInPlace, Noisy, ClampsUnseen),
    *(partial(CopiesOfAView, way) for way in ("before", "after", "kept")),
    partial(WritesWhatAViewSees, True),
]
ALIKE = ("after",)
"""Ways of a kind that has another one here."""


@pytest.mark.parametrize("kind", sampled(KINDS, lambda kind: not (isinstance(kind, partial) and kind.args[0] in ALIKE)))
def test_what_is_not_proven_is_captured_as_it_is(kind):
    try:
        module = check_module(kind, lambda: torch.randn(STEPS, 2, 3, requires_grad=True), calls=1)
    except UnsupportedModule:  # by name, as ever
        return
    assert not marks_of(stats(module).entries[0].lowered)


@pytest.mark.parametrize(
    "kind",
    [
        partial(WritesWhatAViewSees, False),
        pytest.param(KeepsElsewhere, marks=pytest.mark.cpu("numpy has no tensors of a GPU")),
    ],
)
def test_what_may_be_proven_is_eagers(kind):
    """A write that only a view of the same step sees; a number that was read before the loop."""
    try:
        check_module(kind, lambda: torch.randn(STEPS, 2, 3, requires_grad=True), calls=1)
    except UnsupportedModule:  # by name, as ever
        return
