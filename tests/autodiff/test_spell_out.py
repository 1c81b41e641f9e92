"""Normalizations spelled out: values, gradients and types against torch; before and after as text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tvm.relax import TupleGetItem, op

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


def test_rms_norm():
    build = _spelled(lambda scope, x, weight: op.nn.rms_norm(x, weight, [-1], 1e-5))
    check(build, lambda x, w: F.rms_norm(x, (4,), w, 1e-5), draw(2, 3, 4), draw(4, seed=1))


def test_group_norm():
    build = _spelled(lambda scope, x, gamma, beta: op.nn.group_norm(x, gamma, beta, 2, 1, [2, 3], 1e-5))
    check(build, lambda x, g, b: F.group_norm(x, 2, g, b), draw(2, 6, 3, 2), draw(6, seed=1), draw(6, seed=2))


def test_instance_norm():
    build = _spelled(lambda scope, x, gamma, beta: op.nn.instance_norm(x, gamma, beta, 1, [2, 3], 1e-5))
    theirs = lambda x, g, b: F.instance_norm(x, weight=g, bias=b)  # noqa: E731
    check(build, theirs, draw(2, 3, 4, 2), draw(3, seed=1), draw(3, seed=2))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training):
    def build(scope, x, gamma, beta, mean, variance):
        triple = scope.emit(op.nn.batch_norm(x, gamma, beta, mean, variance, 1, 1e-5, momentum=0.25, training=training))
        return [TupleGetItem(triple, index) for index in range(3)]

    def theirs(x, gamma, beta, mean, variance):
        if not training:
            column = (3, 1, 1)
            normalized = (x - mean.view(column)) / (variance.view(column) + 1e-5).sqrt()
            return [normalized * gamma.view(column) + beta.view(column), mean * 1.0, variance * 1.0]
        y = F.batch_norm(x, None, None, gamma, beta, training=True)
        biased = x.var((0, 2, 3), correction=0)  # TVM's operator averages the biased variance
        return [y, 0.75 * mean + 0.25 * x.mean((0, 2, 3)), 0.75 * variance + 0.25 * biased]

    args = [draw(2, 3, 4, 2), *(draw(3, low=0.5, seed=seed) for seed in range(1, 5))]
    check(_spelled(build), theirs, *args)


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
