"""Gradients in float32 and half types against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from tvm.relax import op

from autodiff import clean, differentiate
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import check, draw
from tests.autodiff.samples.elementwise import UNARY
from tests.sampling import sampled


def test_casts_between_floating_point_types():
    def build(scope, p):
        return op.astype(scope.emit(op.exp(scope.emit(op.astype(p, "float64")))), "float32")

    check(build, lambda p: p.double().exp().float(), draw(3, 4).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["nn.gelu", "nn.gelu_tanh", "nn.silu"])
def test_float32_gradients_far_out_are_accurate(name):
    ours, theirs, _ = UNARY[name]
    x = torch.tensor([-30.0, -12.0, -6.0, 6.0, 12.0, 30.0])
    (got, exact) = _gradients(ours, theirs, x)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(("nn.gelu", "nn.silu"), (torch.bfloat16, torch.float16)),
        [("nn.gelu", torch.bfloat16), ("nn.silu", torch.float16)],
    ),
    ids=str,
)
def test_half_gradients_are_rounded_once(name, dtype):
    ours, theirs, _ = UNARY[name]
    got, exact = _gradients(ours, theirs, draw(64, low=-4, high=4).to(dtype))
    torch.testing.assert_close(got, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def _gradients(ours, theirs, x):
    """The gradient of the sum by our rule, and by torch in float64."""
    joint = clean(differentiate(function(lambda scope, p: ours(p), x), [0], [0]))
    leaf = x.double().requires_grad_()
    return evaluate(joint, x, torch.ones_like(x))[1], torch.autograd.grad(theirs(leaf).sum(), leaf)[0]
