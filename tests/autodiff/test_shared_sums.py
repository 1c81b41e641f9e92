"""Sums of products with a factor that is not summed over: computed from the sum without it, where there is one."""

from __future__ import annotations

import pytest
import torch
from tvm.relax import op

from autodiff.ir import bindings, op_name
from autodiff.products import share_sums
from tests.autodiff.evaluate import evaluate, function

AXES = [0, 1]


def sums(func) -> int:
    return sum(op_name(value) in ("relax.sum", "relax.mean") for _, value in bindings(func))


@pytest.mark.parametrize("first, then", [("sum", "mean"), ("mean", "sum"), ("sum", "sum")])
def test_factors_of_a_channel(first, then):
    """The four sums of a batch normalization's gradient are two."""
    x, hat, weight, scale = (torch.randn(*shape) for shape in ((3, 4, 5), (3, 4, 5), (5,), (1, 1, 5)))

    def build(s, x, hat, weight, scale):
        normal = s.emit(op.multiply(hat, scale))
        scaled = s.emit(op.multiply(x, weight))
        plain = [x, s.emit(op.multiply(x, normal)), scaled, s.emit(op.multiply(scaled, normal))]
        kinds = [first, first, then, then]
        return [getattr(op, kind)(each, AXES, keepdims=True) for kind, each in zip(kinds, plain, strict=True)]

    given = x, hat, weight, scale
    func = function(build, *given, names=["grad_out_0", "hat", "weight", "scale"])
    shared = share_sums(func)
    assert (sums(func), sums(shared)) == (4, 2)
    for ours, wanted in zip(evaluate(shared, *given), evaluate(func, *given), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("shape", [(4, 1), (3, 1, 1), (3, 4, 5)])
def test_factors_that_are_summed_over_stay(shape):
    given = torch.randn(3, 4, 5), torch.randn(shape)

    def build(s, x, y):
        return [op.sum(x, AXES, keepdims=True), op.sum(s.emit(op.multiply(x, y)), AXES, keepdims=True)]

    func = function(build, *given, names=["grad_out_0", "y"])
    assert share_sums(func) is func


def test_a_sum_of_forward_is_added_as_it_is_written():
    """Without the factor it would overflow."""
    given = torch.full((3, 4, 5), 1e38), torch.full((5,), 1e-10)

    def build(s, x, y):
        return [op.sum(x, AXES, keepdims=True), op.sum(s.emit(op.multiply(x, y)), AXES, keepdims=True)]

    func = function(build, *given)
    assert share_sums(func) is func
