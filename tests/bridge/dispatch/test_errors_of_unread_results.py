"""Data-dependent errors of operators whose results are unused: eager raises, and so does a dispatched call."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.device import ASSERTS
from tests.sampling import sampled

pytestmark = ASSERTS

FINE, BEYOND, NEGATIVE = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 9]), torch.tensor([0, 1, -9])
X, TWICE, SINGULAR = torch.rand(4, 5), 2 * torch.eye(3), torch.zeros(3, 3)
MISSING = SINGULAR * float("nan")

CASES = {
    "x[i]": (lambda x, i: x[i], (X, FINE), (X, BEYOND)),
    "x[i], negative": (lambda x, i: x[i], (X, FINE), (X, NEGATIVE)),
    "one_hot": (lambda x, i: F.one_hot(i, 4), (X, FINE), (X, BEYOND)),
    "inv": (lambda x, i: torch.linalg.inv(x), (TWICE, FINE), (SINGULAR, FINE)),
    "embedding": (lambda x, i: F.embedding(i, x), (X, FINE), (X, BEYOND)),
    "integers": (lambda x, i: 5 // i, (X, FINE + 1), (X, FINE)),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x), (X, FINE), (X, BEYOND)),
    "index_select": (lambda x, i: x.index_select(1, i), (X, FINE), (X, BEYOND)),
    "gather": (lambda x, i: x.gather(1, i[None]), (X, FINE), (X, BEYOND)),
    "take": (lambda x, i: x.take(i), (X, FINE), (X, BEYOND * 9)),
    "scatter_add": (lambda x, i: torch.zeros(4).scatter_add(0, i, x[0, :3]), (X, FINE), (X, BEYOND)),
    "index_add": (lambda x, i: torch.zeros(4).index_add(0, i, x[0, :3]), (X, FINE), (X, BEYOND)),
    "index_put": (lambda x, i: torch.zeros(4).index_put((i,), x[0, :3]), (X, FINE), (X, BEYOND)),
    "put": (lambda x, i: x.put(i, x[0, :3]), (X, FINE), (X, BEYOND * 9)),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:3], i), (X, FINE), (X, BEYOND)),
    "multi_margin_loss": (lambda x, i: F.multi_margin_loss(x[:3], i), (X, FINE), (X, BEYOND)),
    "binary_cross_entropy": (lambda x, i: F.binary_cross_entropy(x, x), (X, FINE), (9 * X, FINE)),
    "histc": (lambda x, i: torch.histc(x, 4), (X, FINE), (X * float("nan"), FINE)),
    "repeat_interleave": (lambda x, i: x[:3].repeat_interleave(i, 0, output_size=3), (X, FINE), (X, BEYOND)),
    "max_unpool": (lambda x, i: F.max_unpool1d(x[None, :1, :3], i[None, None], 2, 2), (X, FINE), (X, BEYOND)),
    "cholesky": (lambda x, i: torch.linalg.cholesky(x), (TWICE, FINE), (-TWICE, FINE)),
    "solve": (lambda x, i: torch.linalg.solve(x, x), (TWICE, FINE), (SINGULAR, FINE)),
    "eigh": (lambda x, i: torch.linalg.eigh(x)[0], (TWICE, FINE), (MISSING, FINE)),
    "svd": (lambda x, i: torch.linalg.svd(x)[1], (TWICE, FINE), (MISSING, FINE)),
    "a step's": (lambda x, i: [x[i].tanh() for _ in range(20)], (X, FINE), (X, BEYOND)),
}


class Unread(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x, i):
        self.function(x, i)
        return (x * self.weight).sum()


@pytest.mark.parametrize("name", sampled([*CASES], [*CASES][:6]))
def test_what_nobody_reads_raises(name):
    function, fine, wrong = CASES[name]
    module = Unread(function)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, fine)
    module(*fine).backward()
    assert stats(module).hits == 1
    with pytest.raises(Exception) as wanted:
        eager(*wrong)
    with pytest.raises(type(wanted.value)) as found:
        module(*wrong)
    assert str(found.value) == str(wanted.value)
    torch.testing.assert_close(module.weight.grad, fine[0].sum())


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, i):
        for step in range(20):
            x[i[step]]
            x = self.linear(x).tanh()
        return x


def test_of_a_loop():
    module, x, i = Steps(), torch.randn(3, 4), torch.zeros(20, dtype=torch.long)
    add_tvm_dispatch(module, (x, i))
    assert module(x, i).isfinite().all()
    assert stats(module).hits == 1
    i[19] = 3
    with pytest.raises(IndexError, match="out of bounds"):
        module(x, i)
