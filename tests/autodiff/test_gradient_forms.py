"""Gradient rules beyond their samples: the operators of a gradient, and arguments without one."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.relax import TupleGetItem, op

from autodiff import UndifferentiableOp, clean, differentiate, library
from autodiff.ir import bindings, op_name, shape
from tests.autodiff.evaluate import function
from tests.autodiff.gradcheck import draw


def test_weight_gradient_is_one_product_of_two_matrices():
    def linear(scope, x, weight):
        return op.matmul(x, scope.emit(op.permute_dims(weight)))

    joint = clean(differentiate(function(linear, draw(5, 2, 3), draw(4, 3)), [0], [1]))
    products = [value for _, value in bindings(joint) if op_name(value) == "relax.matmul"]
    assert [shape(arg) for arg in products[1].args] == [(4, 10), (10, 3)]


def test_gradient_of_the_attention_mask_is_unsupported():
    tensors = [draw(1, 1, 4, 8) for _ in range(3)] + [draw(4, 4)]

    def build(scope, q, k, v, mask):
        args = [q, k, v, relax.prim_value(1), mask, relax.prim_value(0.0), relax.prim_value(0), relax.prim_value(0.5)]
        result = relax.TupleType([q.ty, relax.TensorType((1, 1, 4), "float64")])
        pair = scope.emit(library.call("scaled_dot_product_flash_attention", args, result), "pair")
        return TupleGetItem(pair, 0)

    func = function(build, *tensors)
    differentiate(func, [0], [0, 1, 2])
    with pytest.raises(UndifferentiableOp, match=r"scaled_dot_product_flash_attention, bound to 'pair': .*attn_mask"):
        differentiate(func, [0], [0, 3])
