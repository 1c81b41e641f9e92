"""Operators on tensors whose sizes vary: imported once, they give eager's results at every size that guards allow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from bridge import UnsupportedModule
from tests.bridge.symbolic import assert_as_eager, imported
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="products and poolings of older versions fix the sizes, or guard them further"
)

N, M = Dim("n"), Dim("m")


class Of(nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def normal(n: int, m: int) -> torch.Tensor:
    return torch.randn(n, m, 4, dtype=torch.float64)


def _written(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[:, 0] = 1.5
    x[:, 1:] = x[:, :-1].clone()
    x[:, ::2] = 0.0
    return x


def _shapes(x):
    even = x.reshape(x.shape[0] * x.shape[1], -1).view(-1, 2, 2).sum(1)
    return even, x.flatten(1).unflatten(1, (-1, 2, 2)).transpose(1, 2), x.flatten().view_as(x) * 2


def _filled(x):
    rows = torch.full((x.shape[1], 1), x.shape[0], dtype=x.dtype) + torch.ones_like(x)
    return x + rows, torch.cat([x, x[:, :1], x.new_zeros(x.shape[0], 2, 4)], 1), torch.stack([x, x + 1], 1)


def _reduced(x):
    return x.mean(1) + x.sum(1) / x.shape[1], x.var(1), x.std(0, correction=0), x.norm(dim=1), x.amax(1), x.argmax(1)


def _indexed(x):
    rows = torch.arange(x.shape[0])
    first = torch.zeros(x.shape[0], dtype=torch.long)
    return x[:, _down(x.shape[1])] * 2, x[rows, x.argmax(1)[:, 0]] * 2, x.index_put((rows, first), x[:, 1])


def _padded(x):
    return F.pad(x, (0, 0, 2, 1)), F.pad(x, (1, 1), mode="reflect"), F.pad(x, (0, 0, 0, 40 - x.shape[1]))


def _resized(x):
    by_size = F.interpolate(x.mT, x.shape[1] + 3, mode="linear"), F.interpolate(x[:, None], (5, 7), mode="bilinear")
    return F.interpolate(x.mT, scale_factor=2) * 2, F.interpolate(x, scale_factor=0.5) * 2, *by_size


def _norms(x):
    return F.layer_norm(x, x.shape[1:]), F.group_norm(x.mT, 2), F.batch_norm(x.mT, None, None, training=True)


def _losses(x):
    likely = F.logsigmoid(x).mean()
    return F.mse_loss(x, x * 2), F.cross_entropy(x.mT, x.argmax(2)), F.cosine_similarity(x, x.flip(1), -1), likely


def _numbers(x):
    kept = torch.where(x > 0, x, x.shape[0]), torch.arange(9).clamp(max=x.shape[1] - 1), x.sum() / x.numel()
    made = torch.add(x, x, alpha=x.shape[0]), torch.sub(x, x, alpha=x.shape[1] ** -0.5), x ** (x.shape[1] - 1)
    return (
        x * x.shape[1] + x.shape[0],
        x / x.shape[1] - 1 / x.shape[0],
        x * x.shape[1] ** -0.5,
        x.shape[0],
        *kept,
        *made,
    )


def _drawn(x):
    places = torch.randint(0, x.shape[1], (x.shape[0], 1, 1)) + torch.randperm(x.shape[1])[:, None]
    return x * torch.rand_like(x) + places, F.dropout(x.transpose(0, 1), 0.3), F.dropout1d(x, 0.3)


def _computed_draws(x):
    kept, noise = torch.bernoulli(x.sigmoid().transpose(0, 1)), torch.normal(x.mean(1, keepdim=True).expand_as(x), 2.0)
    return x * kept.transpose(0, 1) + noise, x * torch.rand(x.shape[1], 1), torch.multinomial(x[0].exp(), 2)


def _causal(x):
    mask = torch.ones(x.shape[1], x.shape[1]).triu(1) > 0
    fused = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
    return _square(x).masked_fill(mask, -math.inf).softmax(-1), fused


ALL_SIZES = {
    "shapes": _shapes,
    "views": lambda x: (x.flatten(1) + 1, (x * 2).permute(2, 0, 1), x[:, :1].expand_as(x) + 0),
    "repeats": lambda x: (x.repeat(2, x.shape[0], 1), x.repeat_interleave(2, 1), x.tile(1, 3, 1)),
    "selected": lambda x: (x[:, -1] * 2, x[0] * 2, x.flip(1) * 2, x.roll(1, 1) * 2),
    "arange": lambda x: x + torch.arange(x.shape[0], x.shape[0] + x.shape[1])[:, None] + _down(x.shape[1])[:, None],
    "triangles": lambda x: (_square(x).tril(), _square(x).triu(1), _square(x) + torch.eye(x.shape[1], dtype=x.dtype)),
    "causal": _causal,
    "filled": _filled,
    "reduced": _reduced,
    "scans": lambda x: (x.cumsum(1), x.flip(0, 2), x.softmax(1) + x.log_softmax(0), x.logsumexp(1), x.sort(1).values),
    "gathered": lambda x: (x.gather(1, x.argsort(1)), torch.zeros_like(x).scatter(1, x.argsort(1), x)),
    "indexed": _indexed,
    "classes": lambda x: F.one_hot(x.argmax(2), 4).double() * 2,
    "padded": _padded,
    "products": lambda x: (torch.einsum("nic,njc->nij", x, x), torch.baddbmm(x, _square(x), x)),
    "norms": _norms,
    "pooled": lambda x: F.adaptive_avg_pool1d(F.conv1d(x.mT, torch.ones(3, 4, 2, dtype=x.dtype), padding=1), 3),
    "rows pooled": lambda x: F.max_pool1d(torch.stack([x.flatten(1)] * 2, 1), 2, 1, 1) * 2,
    "resized": _resized,
    "losses": _losses,
    "numbers": _numbers,
    "half": lambda x: (x.half() * x.shape[1] / x.shape[0], x.float() * x.shape[1]),
    "draws": _drawn,
    "computed draws": _computed_draws,
    "parts": lambda x: [part * 2 for part in (*x.split(2, 2), *x.unbind(2), *x.chunk(2, 2))],
    "diagonals": lambda x: (_square(x).diagonal(dim1=1, dim2=2) * 2, x.mean(2).diag_embed()),
    "reading": lambda x: x * 2 if (x > -100).all() else x,
    "position": lambda x: x[:, (x.sum() * 0).long()] * 2,
    "bags": lambda x: x * _bags(torch.ones(5, 3, dtype=x.dtype)).sum(),
}


def _bags(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(torch.tensor([[0, 4], [1, 0]]), weight.cumsum(0))


def _down(count: int) -> torch.Tensor:
    return torch.arange(count - 1, -1, -1)


def _square(x: torch.Tensor) -> torch.Tensor:
    return x @ x.transpose(1, 2)


ALONE = ("draws", "computed draws", "reading", "position", "numbers")
"""They draw, or read numbers."""
OF_SHAPES = ("views", "selected", "scans", "gathered", "classes", "products", "diagonals", "parts")
"""By rules of shapes alone: no size becomes a number in them."""
TOGETHER = [name for name in ALL_SIZES if name not in (*ALONE, *OF_SHAPES)]
GROUPS = [*((name,) for name in ALONE), *(TOGETHER[at::6] for at in range(6)), *(OF_SHAPES[at::2] for at in range(2))]


@pytest.mark.parametrize(
    "names",
    sampled([pytest.param(tuple(names)) for names in GROUPS], lambda names: names[0] not in OF_SHAPES),
    ids=", ".join,
)
def test_at_all_sizes(names):
    function = Of(lambda x: [ALL_SIZES[name](x) for name in names])
    lowered = imported(function, normal(4, 6), ({0: N, 1: M},))
    assert_as_eager(lowered, normal, [(2, 2), (5, 12), (7, 4)])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_a_table(mode):
    module = nn.Sequential(Of(lambda x: x.argmax(1)), nn.EmbeddingBag(9, 3, mode=mode, padding_idx=1)).double()
    assert_as_eager(imported(module, normal(4, 6), ({0: N, 1: M},)), normal, [(2, 2), (5, 9), (7, 4)])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_computed_weights(mode):
    module = Of(lambda x: F.embedding_bag(x.argmax(1) % len(x), x[:, 0] * 2, mode=mode))
    assert_as_eager(imported(module, normal(4, 6), ({0: N, 1: M},)), normal, [(2, 2), (5, 9), (7, 4)])


SOME_SIZES = {
    "slices": (lambda x: (x[:, 1:] * 2, x[:, ::2] * 2, x[:, :3] * 2, F.pad(x[:, :-1], (0, 0, 1, 0))), 4),
    "halves": (lambda x: (x[:, : x.shape[1] // 2] * 2, F.avg_pool1d(x.mT, 2)), 4),
    "written": (_written, 3),
    "windows": (lambda x: x.unfold(1, 2, 1) * 2, 3),
    "split": (lambda x: [part * 2 for part in x.split(x.shape[1] - 1, 1)], 3),
    "largest": (lambda x: x[:, : max(x.shape[1] - 3, 2)] * 2, 5),
    "smallest": (lambda x: x[:, : min(x.shape[1], 5)] * 2, 6),
    "branch": (lambda x: x * 2 if x.shape[1] > 4 else x, 5),
}


@pytest.mark.parametrize("name", SOME_SIZES)
def test_at_sizes_from_one_on(name):
    """An extent of 1 in a result is a separate case, which the guards exclude."""
    function, least = SOME_SIZES[name]
    lowered = imported(Of(function), normal(4, 6), ({0: N, 1: M},))
    broken = lowered.captured.sizes.scope.broken()
    assert [m for m in range(2, 9) if broken({"n": 4, "m": m}) is None] == list(range(least, 9))
    assert_as_eager(lowered, normal, [(3, least), (2, 7), (5, 8)])


class Cell(nn.Module):
    """One step for each row."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return self.cell(x[:, 0])


LAYERS = {
    "lstm cell": Cell(nn.LSTMCell(4, 3)),
    "lstm": nn.LSTM(4, 3, batch_first=True),
    "gru": nn.GRU(4, 3, 2, batch_first=True, dropout=0.2, bidirectional=True),
    "encoder": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
}


@pytest.mark.parametrize("name", sampled(LAYERS, ["lstm"]))
def test_layers_of_any_batch(name):
    lowered = imported(LAYERS[name].double(), normal(4, 6), ({0: N},))
    assert_as_eager(lowered, lambda n: normal(n, 6), [(4,), (2,), (7,)])


REFUSED = {
    "a factor of a half type that is made of sizes": lambda x: torch.add(x.half(), x.half(), alpha=x.shape[0]),
    "an exponent of float16 that is made of sizes which vary": lambda x: x.half() ** x.shape[0],
    "a geometry in memory of a size that varies": lambda x: x.as_strided((x.shape[0], 2), (x.stride(0), 1)) * 2,
    "a geometry in memory where sizes vary": lambda x: x + torch.ones(4).as_strided((2, 4), (0, 1)).sum(0),
    "the k-th value of a size that varies": lambda x: x.kthvalue(x.shape[1] - 1, 1).values,
    "the sample's 6 alone": lambda x: x / math.sqrt(x.shape[1]),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_bakes_a_size_into_a_number_is_refused_by_name(words):
    with pytest.raises(UnsupportedModule, match=words):
        imported(Of(REFUSED[words]), normal(4, 6), ({0: N, 1: M},))
