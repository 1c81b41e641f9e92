"""Biases of half types in convolutions and addmm are added before rounding: seen where bias and product cancel."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from bridge.compile import CallLibrary

ROWS, INNER, COLUMNS = 5, 33, 9
FLOOR = 1e-5
"""An error that one rounding leaves where the sum is near zero; a rounding before leaves 1e-3 or more."""


def _images(x, w):
    """Two channels in channels_last, and a kernel of 2 x 4."""
    kernel = w.reshape(-1, 1, 3, 11)[:, :, :2, :4].repeat(1, 2, 1, 1)
    return x[None, None].repeat(1, 2, 1, 1).to(memory_format=torch.channels_last), kernel


COLUMNS_LAST = {
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm, a number": lambda x, w, b: torch.addmm(b[0], x, w.t()),
    "addmm, a matrix": lambda x, w, b: torch.addmm(b * x[:, :1].sign(), x, w.t()),
    "addmm, scaled": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.75, alpha=1.5),
    "addmm, only scaled": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0, alpha=1.3),
    "addmv": lambda x, w, b: torch.addmv(b, w, x[0]),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x[None], w.t()[None], alpha=0.3),
    "addbmm": lambda x, w, b: torch.addbmm(b, x[None], w.t()[None]),
    "product and sum": lambda x, w, b: x @ w.t() + b,
    "product and residual": lambda x, w, b: x @ w.t() + b.expand(ROWS, -1).clone(),
}

CHANNELS_SECOND = {
    "conv1d": lambda x, w, b: F.conv1d(x[None], w[:, None, :7].repeat(1, ROWS, 1), b),
    "conv2d": lambda x, w, b: F.conv2d(x[None, None], w[:, None, None, :7], b),
    "conv2d, channels last": lambda x, w, b: F.conv2d(*_images(x, w), b),
    "transposed": lambda x, w, b: F.conv_transpose2d(x[None, None], w[None, :, None, :7], b),
}

FUNCTIONS = {**COLUMNS_LAST, **CHANNELS_SECOND}


class Layer(nn.Module):
    """A function of an input, a weight and a bias, and its relu."""

    def __init__(self, function, weight, bias):
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        y = self.function(x, self.weight, self.bias)
        return y, y.relu()


def _cancelling(name, dtype, extents=(ROWS, INNER, COLUMNS)):
    """``x``, weight, bias in float64, rounded to ``dtype``: the first result of each column is nearly zero."""
    rows, inner, columns = extents
    generator = torch.Generator().manual_seed(9590000)
    x, w = (torch.randn(count, inner, generator=generator).to(dtype).double() for count in (rows, columns))

    def first(bias):
        y = FUNCTIONS[name](x, w, bias.double())
        return y[0].flatten(1)[:, 0] if name in CHANNELS_SECOND else y.flatten(0, -2)[0] if y.ndim > 1 else y

    product = first(torch.zeros(columns))
    slope = first(torch.ones(columns)) - product
    bias = torch.where(slope == 0, 0, -product / slope).expand(columns)
    return x, w, bias.to(dtype).double()


def _numbers(module, x, context=contextlib.nullcontext):
    """The results and gradients of a call, in float64."""
    x = x.clone().requires_grad_()
    with context():
        y, positive = module(x)
    (positive * torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)).sum().backward()
    return [each.detach().double() for each in (y, positive, x.grad, module.weight.grad, module.bias.grad)]


def _compare(name, dtype, cast, given):
    x, w, b = given
    held, context = torch.float32 if cast else dtype, contextlib.nullcontext
    if cast:
        context = lambda: torch.autocast("cpu", dtype)  # noqa: E731
    ours, eager = (Layer(FUNCTIONS[name], w.to(held), b.to(held)) for _ in range(2))
    with context():
        add_tvm_dispatch(ours, x.to(held).requires_grad_())
    wanted = _numbers(Layer(FUNCTIONS[name], w, b), x)
    made, theirs = (_numbers(layer, x.to(held), context) for layer in (ours, eager))
    assert stats(ours).hits == 1
    near = wanted[0].abs() < 0.02 * wanted[0].abs().max()
    for number, (one, other, exact) in enumerate(zip(made, theirs, wanted, strict=True)):
        parts = [(one - exact, other - exact)]
        parts += [(each[0][near], each[1][near]) for each in parts if number < 2 and near.any()]
        for error, of_eager in parts:
            assert error.abs().max() <= 1.5 * of_eager.abs().max() + FLOOR


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "autocast"])
def test_no_more_roundings_than_eagers(name, kind):
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    _compare(name, dtype, kind == "autocast", _cancelling(name, dtype))


@pytest.mark.parametrize("extents", [(255, 6, 7), (1, 6, 7), (64, 64, 64), (300, 128, 128)], ids=str)
@pytest.mark.parametrize("name", ["addmm"])
def test_shapes(extents, name):
    _compare(name, torch.bfloat16, True, _cancelling(name, torch.bfloat16, extents))


@pytest.mark.parametrize("name", ["addmm", "addmm, scaled", "conv2d"])
def test_rows_that_vary(name):
    x, w, b = (each.bfloat16() for each in _cancelling(name, torch.bfloat16))
    module = Layer(FUNCTIONS[name], w, b)
    add_tvm_dispatch(module, x, dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
    for rows in (5, 2, 40):
        given = x.repeat(8, 1)[:rows]
        assert torch.equal(module(given)[0], FUNCTIONS[name](given, w, b))
    assert stats(module).hits == 3


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "conv2d"])
def test_float32_has_generated_sums(name):
    """Its sums need no care: they fuse with the reader."""
    x, w, b = (each.float() for each in _cancelling(name, torch.float32))
    module = Layer(FUNCTIONS[name], w, b)
    add_tvm_dispatch(module, x)
    (entry,) = stats(module).entries
    names = [step.name for step in entry.forward.steps if isinstance(step, CallLibrary)]
    assert not {"mm_biased", "operator"} & set(names)
