"""Bias epilogues: sums that become one call and sums that must not; dtypes inside a GPU's calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from tvm.relax import op

from autodiff import fuse_bias_epilogues
from autodiff.ir import bindings, library_name
from bridge import add_tvm_dispatch, lower, stats
from bridge.lowering import pipeline
from tests.autodiff.evaluate import function


def _biased(func) -> int:
    return sum(library_name(value) == "library.matmul_bias" for _, value in bindings(func))


def _made(rows=256, inner=16, columns=24, dtype=torch.bfloat16, bias=(24,), read=False):
    tensors = [torch.zeros(extents, dtype=dtype) for extents in ((rows, inner), (inner, columns), bias)]

    def build(s, x, w, b):
        product = s.emit(op.matmul(x, w))
        total = s.emit(op.add(product, b))
        return [total, op.negative(product)] if read else total

    return function(build, *tensors)


def test_products_of_many_rows_add_their_biases():
    for dtype, rows in ((torch.bfloat16, 256), (torch.float16, 256), (torch.float32, 4096)):
        assert _biased(fuse_bias_epilogues(_made(rows, dtype=dtype))) == 1
        assert _biased(fuse_bias_epilogues(_made(rows, dtype=dtype, columns=21, bias=(21,)))) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 255},
        {"rows": 4095, "dtype": torch.float32},
        {"inner": 12},
        {"bias": (256, 24)},
        {"dtype": torch.float64},
        {"read": True},
    ],
    ids=str,
)
def test_what_stays(other):
    func = _made(**other)
    assert fuse_bias_epilogues(func) is func


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)))


class _Losses(_Layers):
    """Returns the output and its loss; only the loss is differentiated."""

    def forward(self, x):
        y = super().forward(x)
        return y.square().mean(), y


def test_backward_of_one_of_two_outputs(monkeypatch):
    monkeypatch.setattr(pipeline, "HOST", torch.device("meta"))
    torch.manual_seed(0)
    module, x = _Losses(), torch.randn(4096, 16)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for one in (module, eager):
        one(x)[0].backward()
    ours, theirs = ([p.grad for p in one.parameters()] for one in (module, eager))
    assert stats(module).hits == 1
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(4100, 16), (4, 1030, 16)])
def test_numbers_are_eagers(monkeypatch, shape):
    monkeypatch.setattr(pipeline, "HOST", torch.device("meta"))  # as if the module were on a GPU
    torch.manual_seed(0)
    module, x = _Layers(), torch.randn(shape, requires_grad=True)
    eager, y = copy.deepcopy(module), x.detach().clone().requires_grad_()
    assert _biased(lower(module, x).forward) == 2
    with torch.no_grad():
        assert _biased(lower(module, x).forward) == 2
    add_tvm_dispatch(module, x)
    for one, given in ((module, x), (eager, y)):
        one(given).square().sum().backward()
    assert stats(module).hits == 1
    ours, theirs = ([given.grad, *(p.grad for p in one.parameters())] for one, given in ((module, x), (eager, y)))
    torch.testing.assert_close(ours, theirs)


def test_numbers_of_rows_that_vary(monkeypatch):
    """The sample's number of rows decides; with fewer or more, results also equal eager's."""
    monkeypatch.setattr(pipeline, "HOST", torch.device("meta"))
    torch.manual_seed(0)
    module, varying = _Layers(), ({1: torch.export.Dim("length", max=4096)},)
    eager = copy.deepcopy(module)
    x = torch.randn(4, 1030, 16)
    assert _biased(lower(module, x, dynamic_shapes=varying).forward) == 2
    add_tvm_dispatch(module, x, dynamic_shapes=varying)
    for length in (1030, 7, 2000):
        x = torch.randn(4, length, 16)
        ours, theirs = module(x), eager(x)
        for made, layers in ((ours, module), (theirs, eager)):
            layers.zero_grad()
            made.square().sum().backward()
        torch.testing.assert_close(ours, theirs)
        for mine, its in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
    assert stats(module).hits == 3
