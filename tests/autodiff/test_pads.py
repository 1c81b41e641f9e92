"""Sums of zero paddings → one concatenation, or a sum that must stay."""

from __future__ import annotations

import torch
from tvm.relax import op

from autodiff import clean, differentiate, join_pads
from autodiff.ir import bindings, op_name
from tests.autodiff.evaluate import evaluate, function


def _ops(func) -> list[str]:
    return [op_name(value) for _, value in bindings(func)]


def _pad(scope, x, axis, before, after):
    widths = [0, 0, 0, 0]
    widths[2 * axis : 2 * axis + 2] = before, after
    return scope.emit(op.nn.pad(x, widths))


def test_gaps_at_the_ends_are_zeros_and_infinities_pass():
    a, b = torch.tensor([[1.0, torch.inf]]), torch.tensor([[torch.nan, -2.0]])
    func = function(lambda s, x, y: op.add(_pad(s, x, 1, 1, 5), _pad(s, y, 1, 4, 2)), a, b)
    (wanted,), (got,) = evaluate(func, a, b), evaluate(join_pads(func), a, b)
    assert "relax.add" not in _ops(join_pads(func))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_an_intermediate_sum_that_is_read_stays_available():
    a, b, c = torch.randn(2, 3), torch.randn(1, 3), torch.randn(1, 3)

    def build(s, x, y, z):
        first = s.emit(op.add(_pad(s, x, 0, 0, 2), _pad(s, y, 0, 2, 1)))
        return [op.multiply(first, first), op.add(first, _pad(s, z, 0, 3, 0))]

    func = function(build, a, b, c)
    joined = join_pads(func)
    assert sorted(_ops(joined)) == ["relax.concat", "relax.concat", "relax.multiply", "relax.zeros"]
    for got, wanted in zip(evaluate(joined, a, b, c), evaluate(func, a, b, c), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_what_overlaps_or_is_not_zero_stays_a_sum():
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    cases = [
        lambda s, x, y: op.add(_pad(s, x, 1, 0, 3), _pad(s, y, 1, 1, 2)),  # one element in common
        lambda s, x, y: op.add(_pad(s, x, 0, 0, 2), _pad(s, y, 0, 0, 2)),  # all
        lambda s, x, y: op.add(s.emit(op.nn.pad(x, [0, 0, 0, 2], pad_value=1.0)), _pad(s, y, 1, 2, 0)),
        lambda s, x, y: op.add(s.emit(op.nn.pad(x, [0, 0, 0, 2], pad_mode="reflect")), _pad(s, y, 1, 2, 0)),
        lambda s, x, y: op.subtract(_pad(s, x, 1, 0, 2), _pad(s, y, 1, 2, 0)),
        lambda s, x, y: op.add(s.emit(op.nn.pad(x, [0, 1, 0, 1])), s.emit(op.nn.pad(y, [1, 0, 1, 0]))),  # two axes
    ]
    for build in cases:
        func = function(build, a, b)
        assert join_pads(func) is func


def test_the_gradient_of_a_chunked_tensor_is_one_concatenation():
    x = torch.randn(4, 12, dtype=torch.float64)

    def build(s, p):
        parts = [s.emit(op.strided_slice(p, [1], [3 * k], [3 * k + 3])) for k in range(4)]
        product = parts[0]
        for part in parts[1:]:
            product = s.emit(op.multiply(product, part))
        return product

    func = function(build, x)
    joint = clean(differentiate(func, [0], [0]))
    assert _ops(joint).count("relax.concat") == 1 and "relax.nn.pad" not in _ops(joint)
    grad = torch.randn(4, 3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    product = torch.stack(leaf.chunk(4, 1)).prod(0)
    product.backward(grad)
    _, gradient = evaluate(joint, x, grad)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-12)


def test_what_is_broadcast_in_the_sum_stays_a_sum():
    for first, second, axis in (((1, 2), (3, 2), 1), ((2, 1), (2, 3), 0), ((2, 2), (2, 2), 1)):
        a, b = torch.randn(first), torch.randn(second)
        func = function(lambda s, x, y, k=axis: op.add(_pad(s, x, k, 0, 2), _pad(s, y, k, 2, 0)), a, b)
        assert (join_pads(func) is func) == (first != second)
        (wanted,), (got,) = evaluate(func, a, b), evaluate(join_pads(func), a, b)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
