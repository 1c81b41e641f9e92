"""Writes through windows and expanded tensors: eager's numbers, elements beside and infinite ones too, or a refusal."""

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch
from tests.bridge.compare import check_module


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.scale, self.write = nn.Parameter(torch.rand(5, 6)), write

    def forward(self, x):
        y = x * self.scale
        made = self.write(y)
        return y, y.diagonal(1) * 2, made if made is None else made * 1


WRITTEN = {
    "windows of one": lambda y: y.unfold(0, 1, 2).fill_(0.5),
    "by positions": lambda y: y.unfold(-1, 1, 4).__setitem__(torch.arange(2), 0.5),
    "windows with gaps": lambda y: y.unfold(1, 2, 3).mul_(2),
    "a rest behind the windows": lambda y: y.unfold(0, 2, 2)[1].neg_(),
    "one window": lambda y: y.unfold(0, 3, 4).mul_(3),
    "windows of windows": lambda y: y.unfold(1, 2, 2).unfold(0, 1, 3)[..., 1, :].mul_(3),
    "windows of a transpose": lambda y: y.t().unfold(0, 2, 3)[0].sigmoid_(),
    "expanded to its own shape": lambda y: y.expand_as(y)[1:].fill_(0.5),
    "copies of expanded tensors": lambda y: (
        y.expand(2, 5, 6).contiguous().exp_().sum() + y.expand(2, 5, 6).reshape(10, 6).sin_().sum()
    ),
    "an axis of one": lambda y: y.expand(1, 5, 6)[0, 1:].fill_(0.5),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_as_in_eager(write):
    check_module(lambda: Writes(write).double(), lambda: torch.randn(5, 6, dtype=torch.float64), calls=1)


ONE_OF_SEVERAL = {
    "values of topk": lambda y: y.topk(2, -1)[0],
    "values of median": lambda y: y.median(1)[0],
    "least and largest": lambda y: y.detach().aminmax(dim=1)[1],
    "maxima of a pool": lambda y: nn.functional.adaptive_max_pool1d(y, 2, return_indices=True)[0],
    "values of sort": lambda y: y.sort(1).values,
    "means of bags": lambda y: nn.functional.embedding_bag(torch.tensor([[1, 2], [0, 4]]), y, mode="mean"),
    "factor of qr": lambda y: torch.linalg.qr(y.detach())[1],
}
"""Operators of several results, of which one is read."""


@pytest.mark.parametrize("one", ONE_OF_SEVERAL.values(), ids=ONE_OF_SEVERAL)
def test_one_of_several_results_is_written(one):
    check_module(lambda: Writes(lambda y: one(y).mul_(2)).double(), lambda: torch.randn(5, 6).double(), calls=1)


@pytest.mark.parametrize("name", ["windows with gaps", "expanded to its own shape", "an axis of one"])
def test_of_large_numbers(name):
    """A small number that is added to a large one and its negative is lost."""
    module, x = Writes(WRITTEN[name]), torch.full((5, 6), 1e300, dtype=torch.float64)
    x[1] = torch.inf
    wanted = module(x)
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "write, words",
    [
        (lambda y: y.unfold(0, 2, 1)[0].fill_(0.5), "windows"),
        (lambda y: y[:, :5].unfold(1, 2, 3).fill_(0.5), "windows"),
        (lambda y: y.expand(2, 5, 6)[0].fill_(0.5), "expanded"),
        (lambda y: torch.meshgrid(y[0], y[1], indexing="ij")[0][0, 0].fill_(0.5), "expanded"),
    ],
)
def test_what_cannot_be_written_is_refused(write, words):
    module, x = Writes(write), torch.randn(5, 6)
    with pytest.raises(UnsupportedModule, match=f"in place through a view of .*{words}"):
        add_tvm_dispatch(module, x)


class WritesArgument(nn.Module):
    def forward(self, x):
        nn.functional.leaky_relu_(x[:1], 0.1)
        return x * 2


def test_an_expanded_argument_is_not_written():
    """A write to one row is seen in the other: a functional graph has two."""
    x = torch.full((1,), -1.0).expand(2, 1)
    with pytest.raises(UnsupportedModule, match=r"leaky_relu_.*elements lie in one place"):
        add_tvm_dispatch(WritesArgument(), x)
    assert x.tolist() == [[-1.0], [-1.0]]


class WritesBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(1).expand(3, 1))

    def forward(self, x):
        self.kept[0] = 2.0
        return x * self.kept


def test_an_expanded_buffer_is_not_written():
    with pytest.raises(UnsupportedModule, match="elements lie in one place"):
        add_tvm_dispatch(WritesBuffer(), torch.ones(3, 2))


class DetachedResult(nn.Module):
    """A constant that is the new result of an operator which also writes one of its arguments."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.rand(6)), nn.BatchNorm1d(6)

    def forward(self, x):
        y = x * self.scale
        slopes = torch.ops.aten.rrelu_with_noise(y, torch.empty_like(y), 0.1, 0.3, False)
        normed = torch.ops.aten._native_batch_norm_legit(
            y, self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var, True, 0.1, 1e-5
        )[0]
        return slopes.detach() * y, normed.detach() * y


def test_a_new_result_beside_a_write_can_be_detached():
    check_module(lambda: DetachedResult().double(), lambda: torch.randn(5, 6, dtype=torch.float64), calls=1)
