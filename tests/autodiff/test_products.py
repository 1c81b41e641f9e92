"""Sums of matrix products → one longer product, or a sum that must stay."""

from __future__ import annotations

import pytest
import torch
from tvm.relax import op

from autodiff import clean, differentiate, join_products
from autodiff.ir import bindings, op_name, results
from tests.autodiff.evaluate import evaluate, function


def _ops(func) -> list[str]:
    return [op_name(value) for _, value in bindings(func)]


def _sum_of_products(*, rows=16, columns=12, inner=(2, 3), read=False):
    tensors = [torch.randn(shape, dtype=torch.float64) for k in inner for shape in ((rows, k), (k, columns))]

    def build(s, *params):
        products = [s.emit(op.matmul(a, b)) for a, b in zip(params[::2], params[1::2], strict=True)]
        total = products[0]
        for product in products[1:]:
            total = s.emit(op.add(total, product))
        return [total, op.negative(products[0])] if read else total

    return function(build, *tensors), tensors


@pytest.mark.parametrize("inner", [(2, 3), (1, 2, 4, 3, 2), (5, 5)])
def test_values_stay(inner):
    func, tensors = _sum_of_products(inner=inner)
    joined = join_products(func)
    assert _ops(joined).count("relax.matmul") == 1 and "relax.add" not in _ops(joined)
    (wanted,), (got,) = evaluate(func, *tensors), evaluate(joined, *tensors)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_what_is_large_or_read_elsewhere_stays():
    func, _ = _sum_of_products(inner=(16, 16))  # the matrices are larger than their product
    assert join_products(func) is func
    func, _ = _sum_of_products(inner=(2, 16))  # one product cannot be joined with itself
    assert join_products(func) is func
    func, _ = _sum_of_products(inner=(2, 3), read=True)
    assert join_products(func) is func
    a, b = torch.randn(4, 9, 2), torch.randn(2, 9)
    batched = function(lambda s, x, y: op.add(s.emit(op.matmul(x, y)), s.emit(op.matmul(x, y))), a, b)
    assert join_products(batched) is batched


def test_sums_of_different_shapes_are_joined_apart():
    a, b, c = torch.randn(9, 2), torch.randn(2, 9), torch.randn(3, 9, 9)

    def build(s, x, y, z):
        inside = s.emit(op.add(s.emit(op.matmul(x, y)), s.emit(op.matmul(x, y))))
        return op.add(z, inside)  # broadcast

    func = function(build, a, b, c)
    joined = join_products(func)
    assert _ops(joined).count("relax.matmul") == 1 and _ops(joined).count("relax.add") == 1
    (wanted,), (got,) = evaluate(func, a, b, c), evaluate(joined, a, b, c)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_weight_of_a_recurrence_has_one_gradient_product():
    steps, batch, size = 4, 2, 8
    h, w = torch.randn(batch, size, dtype=torch.float64), torch.randn(size, size, dtype=torch.float64) / 4

    def build(s, x, weight):
        for _ in range(steps):
            x = s.emit(op.tanh(s.emit(op.matmul(x, weight))))
        return x

    joint = clean(differentiate(function(build, h, w), [0], [1]))
    joined = join_products(joint)
    assert _ops(joint).count("relax.matmul") == steps + (steps - 1) + steps
    assert _ops(joined).count("relax.matmul") == steps + (steps - 1) + 1
    assert len(results(joined)) == len(results(joint))
    grad = torch.randn(batch, size, dtype=torch.float64)
    leaf, x = w.clone().requires_grad_(), h
    for _ in range(steps):
        x = torch.tanh(x @ leaf)
    x.backward(grad)
    _, gradient = evaluate(joined, h, w, grad)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-12)
