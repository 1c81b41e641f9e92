"""Normalizations spelled out: values, gradients and types against torch; before and after as text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tvm.relax import op

from autodiff import spell_out
from autodiff.ir import bindings, build_function, dtype, op_name, results, shape
from autodiff.normalization import layer_norm
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import check, draw


def _spelled(build):
    """A build function for the spelled-out form of ``build``'s function."""

    def spelled(scope, *params):
        value = build(scope, *params)
        values = value if isinstance(value, list) else [value]
        values = [scope.emit(item) for item in values]
        inner = spell_out(build_function(list(params), scope.body, values))
        scope.body.clear()
        for var, bound in bindings(inner):
            scope.bind(var, bound)
        return results(inner)

    return spelled


@pytest.mark.parametrize("axes", [[-1], [1, 2], [1]], ids=str)
def test_layer_norm(axes):
    x = draw(2, 3, 4)
    extents = [x.shape[axis] for axis in axes]
    along = [x.shape[axis] if axis in [a % 3 for a in axes] else 1 for axis in range(3)]

    def theirs(x, gamma, beta):
        dims = tuple(axes)
        centred = x - x.mean(dims, keepdim=True)
        normalized = centred / (x.var(dims, correction=0, keepdim=True) + 1e-5).sqrt()
        return normalized * gamma.reshape(along) + beta.reshape(along)

    build = _spelled(lambda scope, x, gamma, beta: op.nn.layer_norm(x, gamma, beta, axes, 1e-5))
    check(build, theirs, x, draw(*extents, seed=1), draw(*extents, seed=2))


@pytest.mark.parametrize("element_type", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_half_types_are_in_float32(element_type):
    x = (draw(4, 64) + 8).to(element_type)
    gamma, beta = torch.ones(64, dtype=element_type), torch.zeros(64, dtype=element_type)
    func = function(lambda scope, x, g, b: layer_norm(x, g, b, [-1], 1e-5, scope), x, gamma, beta)
    values = {var.name: value for var, value in bindings(func)}
    assert (shape(values["layer_norm_mean"]), dtype(values["layer_norm_mean"])) == ((4, 1), "float32")
    (got,) = evaluate(func, x, gamma, beta)
    assert got.dtype == element_type
    exact = F.layer_norm(x.double(), (64,))
    theirs = F.layer_norm(x, (64,), gamma, beta)
    assert (got.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max() + 1e-6


def test_float32_variance_with_a_large_mean():
    x = (draw(4, 64) * 0.01 + 1000).float()
    func = function(lambda scope, x: layer_norm(x, None, None, [-1], 1e-5, scope), x)
    (got,) = evaluate(
        func, x
    )  # E[x^2] - E[x]^2 would have no digit left; the mean's own rounding is 3e-3 of the deviation
    torch.testing.assert_close(got.double(), F.layer_norm(x.double(), (64,)), rtol=0, atol=0.05)


def test_weights_may_be_missing():
    func = function(lambda scope, x: layer_norm(x, None, None, [-1], 1e-5, scope), draw(2, 3))
    assert [op_name(value) for _, value in bindings(func)][-2:] == ["relax.rsqrt", "relax.multiply"]
