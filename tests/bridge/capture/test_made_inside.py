"""Forward makes or sets layers, parameters, ``.data`` of its own tensors and of buffers, frozen parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch
from tests.bridge.beside import beside, double


class Net(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.linear, self.frozen, self.then = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), then
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", double(3, 4))

    def forward(self, x):
        return self.then(self, F.dropout(self.linear(x), 0.3))


class Averages(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mean):
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - mean

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


def momentum(write):
    def then(m, h):
        with torch.no_grad():
            for key, query in zip(m.frozen.parameters(), m.linear.parameters(), strict=True):
                write(key, query)
        return (h * m.frozen(h)).sum(1)

    return then


def set_data(m, h):
    m.mean.data = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h - m.mean


MADE = {
    "layer": lambda m, h: nn.Linear(4, 4).double()(h),
    "convolution": lambda m, h: nn.Conv1d(1, 2, 3, padding=1, dtype=torch.float64)(h[:, None]).sum(1),
    "norms": lambda m, h: nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)).double()(h),
    "embedding": lambda m, h: h + nn.Embedding(4, 4, dtype=torch.float64)(torch.tensor([0, 1, 2])),
    "recurrent": lambda m, h: nn.GRU(4, 4, dtype=torch.float64)(h)[0],
    "parameter": lambda m, h: h * nn.Parameter(torch.rand(4, dtype=torch.float64)),
    "parameter of a result": lambda m, h: h * nn.Parameter(h),
    "leaf": lambda m, h: h * torch.ones(4, dtype=torch.float64, requires_grad=True),
    "a buffer's data": set_data,
    "frozen, data": momentum(lambda key, query: setattr(key, "data", key.data * 0.9 + query.data * 0.1)),
    "frozen, in place": momentum(lambda key, query: key.data.mul_(0.9).add_(query.data, alpha=0.1)),
    "buffer in a Function": lambda m, h: Averages.apply(h, m.mean) * m.mean,
    "draw under no_grad": lambda m, h: h * torch.no_grad()(torch.bernoulli)(h, 0.5),
}


def step(module, own, i):
    out = module(double(10 + i, 3, 4))
    out.square().sum().backward()
    return out, module.mean.clone(), *(each.detach().clone() for each in module.frozen.parameters())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each, marks=pytest.mark.cpu("the addresses of cuDNN's weights are asked for, which is refused"))
        if each == "recurrent"
        else each
        for each in MADE
    ],
)
def test_it_trains_as_in_eager(kind):
    beside(lambda: (Net(MADE[kind]), None), step, lambda m, own: (double(9, 3, 4),))


def given_away(m, h):
    new = m.mean * 2
    m.mean.data = new
    new.add_(1)
    return h + m.mean


def square(h):
    return (h @ h).to_dense()


def in_rows(h):
    return torch.sparse_csr_tensor(torch.arange(len(h) + 1), torch.arange(len(h)), h[:, 0], 2 * [len(h)])


REFUSED = {
    "data of a result": (lambda m, h: (h.exp(), setattr(h, "data", 2 * h.detach()), h)[::2], "Tensor.data =: gives a"),
    "another form": (lambda m, h: (setattr(m.mean, "data", h.detach()), h)[1], "Tensor.data =: gives a tensor other"),
    "written afterwards": (given_away, "an input of the call has been set to"),
    "trained": (lambda m, h: (setattr(m.linear.weight, "data", m.mean + h[0]), h)[1], "Tensor.data ="),
    "no derivative": (lambda m, h: h * torch.bernoulli(h, 0.5), "eager has no derivative of it"),
    "no derivative of parameters": (lambda m, h: torch._sample_dirichlet(h.exp()) * h, "eager has no derivative of it"),
    "a sparse matrix": (lambda m, h: in_rows(h) @ h, "a sparse tensor: .*\n    at .*test_made_inside.py"),
    "a product of sparse matrices": (lambda m, h: square((h @ h.T).to_sparse_csr()), "takes a tensor of layout"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name(kind):
    then, words = REFUSED[kind]
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(Net(then), double(9, 3, 4))
