"""Thirty batches, each of other sizes that arguments and their numbers decide: one entry, and eager's results."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="products of older versions fix the sizes")


class Convolution(nn.Module):
    """A graph convolution: loops are taken out of the edges and put in once, edges weigh by degree."""

    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x, edges):
        count = x.shape[0]
        edges = edges[:, edges[0] != edges[1]]
        loops = torch.arange(count)
        row, col = torch.cat([edges, torch.stack([loops, loops])], 1)
        degree = x.new_zeros(count).scatter_add(0, col, x.new_ones(col.shape[0])).pow(-0.5)
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, col, h[row] * (degree[row] * degree[col])[:, None])


class Graphs(nn.Module):
    """A sum for each graph of a batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Convolution(3, 6), Convolution(6, 6)

    def forward(self, x, edges, batch):
        h = self.second(self.first(x, edges).relu(), edges)
        return h.new_zeros(int(batch.max()) + 1, h.shape[1]).index_add(0, batch, h)


class Detector(nn.Module):
    """The loss of classes and boxes in the cells that have one."""

    def __init__(self):
        super().__init__()
        self.body, self.classes, self.boxes = nn.Conv2d(3, 4, 4, stride=4), nn.Conv2d(4, 5, 1), nn.Conv2d(4, 4, 1)

    def forward(self, image, boxes, labels):
        h = self.body(image).relu()
        scores, found = (each(h)[0].flatten(1).t() for each in (self.classes, self.boxes))
        cells = (boxes[:, :2].long() // 4 * torch.tensor([1, 8])).sum(1)
        target = torch.zeros(64, dtype=torch.long).scatter(0, cells, labels)
        taken = target > 0
        wanted = torch.zeros_like(found).index_copy(0, cells, boxes / 32)
        return F.cross_entropy(scores, target) + F.smooth_l1_loss(found[taken], wanted[taken])


class Sentences(nn.Module):
    """A Transformer over the longest sentence of a batch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, ids, lengths):
        longest = lengths.max()
        pad = torch.arange(longest)[None] >= lengths[:, None]
        return self.layer(self.embedding(ids[:, :longest]), src_key_padding_mask=pad)[~pad]


def numbers(seed):
    return torch.Generator().manual_seed(seed)


def graphs(seed):
    rng = numbers(seed)
    nodes, edges, count = (int(torch.randint(*each, (), generator=rng)) for each in ((9, 30), (30, 99), (3, 9)))
    batch = torch.cat([torch.arange(count), torch.randint(count, (nodes - count,), generator=rng)]).sort()[0]
    x = torch.randn(nodes, 3, generator=rng, dtype=torch.float64)
    return x, torch.randint(nodes, (2, edges), generator=rng), batch


def pictures(seed):
    rng = numbers(seed)
    cells = torch.randperm(64, generator=rng)[: 2 + seed]
    boxes = torch.cat([torch.stack([cells % 8, cells // 8], 1) * 4 + 1, torch.full((len(cells), 2), 6)], 1).double()
    return torch.randn(1, 3, 32, 32, generator=rng, dtype=torch.float64), boxes, torch.arange(len(cells)) % 4 + 1


def sentences(seed):
    lengths = torch.randint(3, 20, (5,), generator=numbers(seed))
    return torch.arange(5 * 24).reshape(5, 24) % 30, lengths


ANY = {0: Dim.DYNAMIC}
CASES = {
    "graphs": (Graphs, graphs, (ANY, {1: Dim.DYNAMIC}, ANY)),
    "detector": (Detector, pictures, (None, ANY, ANY)),
    "sentences": (Sentences, sentences, None),
}
WAYS = ["sample", "no sample", "dynamic_shapes"]


@pytest.mark.parametrize(
    ("name", "way"),
    sampled(
        [(name, way) for name in CASES for way in WAYS if (name, way) != ("sentences", "dynamic_shapes")],
        [("graphs", "sample"), ("graphs", "dynamic_shapes"), ("detector", "no sample"), ("sentences", "sample")],
    ),
)
def test_thirty_batches_are_one_entry(name, way):
    make, batch, shapes = CASES[name]
    torch.manual_seed(0)
    eager = make().double()
    module = copy.deepcopy(eager)
    if way == "no sample":
        add_tvm_dispatch(module)
    else:
        add_tvm_dispatch(
            module, batch(0), **({"on_miss": "compile"} if way == "sample" else {"dynamic_shapes": shapes})
        )
    for seed in range(30):
        assert_same(run(module, Call(batch(seed)), seed=seed), run(eager, Call(batch(seed)), seed=seed))
    assert stats(module).hits == 30 and not stats(module).misses
    assert len(stats(module).entries) == 1
