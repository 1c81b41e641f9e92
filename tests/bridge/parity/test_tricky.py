"""Modules that a careless capture gets wrong: aliasing, in-place writes, layouts, promotions, repeated tensors."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge import UnsupportedModule, add_tvm_dispatch
from tests.bridge.compare import check_module
from tests.sampling import sampled


class InPlaceInside(nn.Module):
    """Writes into its own intermediates, through views too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        functional.relu_(y)
        z = y.clone()
        z[:, 1:3] *= 2
        z[0] = 1.5
        z.view(-1)[3] += y.sum()
        z.t()[5].mul_(0.5)
        return z


class DropoutOfTransposed(nn.Module):
    """Draws in the memory order of a tensor that is not row-major."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x.transpose(1, 2)) + self.dropout(x).transpose(1, 2)


class UnusedDraws(nn.Module):
    """Draws that nothing uses move the generator all the same."""

    def forward(self, x: Tensor) -> Tensor:
        functional.dropout(x, 0.5)
        torch.rand(3)
        y = functional.dropout(x, 0.5)
        torch.randn_like(x)
        return functional.dropout(y, 0.5)


class DrawsOfManyKinds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) * 0.1
        keep = torch.rand(x.shape[0], 1, dtype=x.dtype) < 0.7
        y = torch.where(keep, x + noise, x * torch.rand_like(x))
        return functional.gumbel_softmax(y, tau=0.5) + functional.dropout1d(y[None], 0.5)[0]


class ReturnsViews(nn.Module):
    """Views of the input, of a parameter and of another output, and the input itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> dict:
        y = x @ self.weight
        return {"y": y, "flat": y.view(-1), "x": x, "row": x[1], "t": self.weight.t(), "detached": x.detach()}


class Promotions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.arange(6))
        self.register_buffer("flags", torch.tensor([True, False] * 3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.steps + self.flags
        y = y / (self.steps + 1) - (x > 0) * 2
        return y + (self.steps // 2) + (self.steps % 4) + self.flags.sum() + 3


class StopsGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        target = self.linear(x).detach()
        with torch.no_grad():
            scale = self.linear(x).abs().mean()
        straight_through = x + (x.round() - x).detach()
        return (x - target) * scale * straight_through


class Codebook(nn.Module):
    """An exponential moving average that the module keeps itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.calls += 1
        return (x - self.mean) * self.calls


class SameTensorTwice(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y.exp()


class Permuted(nn.Module):
    """Results whose strides are not row-major."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y.permute(0, 2, 3, 1), y.transpose(1, 3).relu()


def rows() -> Tensor:
    return torch.randn(5, 6, requires_grad=True)


def twice() -> tuple[Tensor, Tensor]:
    x = rows()
    return x, x


CASES = {
    "in place inside": (InPlaceInside, rows),
    "in place activations": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)),
        rows,
    ),
    "dropout of transposed": (DropoutOfTransposed, lambda: torch.randn(2, 5, 7, requires_grad=True)),
    "unused draws": (UnusedDraws, rows),
    "draws of many kinds": (DrawsOfManyKinds, rows),
    "views returned": (ReturnsViews, rows),
    "promotions": (Promotions, rows),
    "gradients stopped": (StopsGradients, rows),
    "codebook": (Codebook, rows),
    "the same tensor twice": (SameTensorTwice, twice),
    "permuted results": (Permuted, lambda: torch.randn(2, 3, 5, 5, requires_grad=True)),
    "transposed sample": (lambda: nn.Linear(5, 3), lambda: torch.randn(5, 6).t().detach().requires_grad_()),
    "expanded sample": (lambda: nn.Linear(6, 3), lambda: torch.randn(1, 6).expand(4, 6)),
    "0-d sample": (nn.Tanh, lambda: torch.randn((), requires_grad=True)),
    "channels last": (
        lambda: nn.Conv2d(3, 4, 3),
        lambda: torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_(),
    ),
    "multi-head attention": (lambda: SelfAttention(8, 2), lambda: torch.randn(3, 4, 8, requires_grad=True)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
        lambda: torch.randn(3, 4, 8, requires_grad=True),
    ),
    "named layers": (
        lambda: nn.Sequential(OrderedDict(a=nn.Linear(6, 6), b=nn.BatchNorm1d(6), c=nn.SiLU())),
        rows,
    ),
}


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x)


@pytest.mark.parametrize("case", sampled(CASES, lambda case: case != "encoder layer"))  # which has the attention
def test_tricky(case):
    make_module, make_inputs = CASES[case]
    check_module(make_module, make_inputs)


class Gates(nn.Module):
    """``torch.bernoulli`` of a number: the tensor only says what to fill, and in which order."""

    def __init__(self, detach: bool):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        like = y.detach() if self.detach else y
        return y * torch.bernoulli(like, 0.6) + torch.bernoulli(x.t(), 0.3).t()


def test_bernoulli_of_a_number():
    check_module(lambda: Gates(detach=True), lambda: torch.randn(5, 6))


def test_bernoulli_that_eager_cannot_differentiate_is_refused():
    with pytest.raises(UnsupportedModule, match=r"aten\.bernoulli\.p: eager has no derivative"):
        add_tvm_dispatch(Gates(detach=False), torch.randn(5, 6))
