"""Gradients of library functions, which torch computes here, against torch.autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import ShapeExpr, TupleGetItem

from autodiff import UndifferentiableOp, differentiate, library
from tests.autodiff.evaluate import function, tensor_type
from tests.autodiff.gradcheck import check, draw


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("by_frequency", [0, 1])
def test_embedding(padding_idx, by_frequency):
    def build(scope, weight, indices):
        args = [weight, indices, relax.prim_value(padding_idx), relax.prim_value(by_frequency)]
        return library.call("embedding", args, relax.TensorType((2, 3, 4), "float64"))

    def theirs(weight, indices):
        padding = None if padding_idx < 0 else padding_idx
        return F.embedding(indices, weight, padding, scale_grad_by_freq=bool(by_frequency))

    check(build, theirs, draw(5, 4), torch.tensor([[0, 2, 2], [4, 0, 0]]))


@pytest.mark.parametrize("masked,causal", [(False, 0), (False, 1), (True, 0)])
def test_attention(masked, causal):
    extents = (2, 2, 4, 8)
    mask = torch.where(draw(4, 4) > -1, 0.0, -1e4).double()

    def build(scope, q, k, v, *mask):
        args = [q, k, v, relax.prim_value(len(mask)), *mask]
        args += [relax.prim_value(0.0), relax.prim_value(causal), relax.prim_value(0.25)]
        result = relax.TupleType([q.ty, relax.TensorType(extents[:3], "float64")])
        pair = scope.emit(library.call("scaled_dot_product_flash_attention", args, result))
        return [TupleGetItem(pair, 0)]

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask if masked else None, is_causal=bool(causal), scale=0.25
        )

    def with_mask(scope, q, k, v):
        return build(scope, q, k, v, *([relax.const(mask.numpy(), "float64")] if masked else []))

    check(with_mask, theirs, *(draw(*extents, seed=seed) for seed in range(3)))


def test_gradient_of_the_attention_mask_is_refused():
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


def _call(name, result, *constants):
    """``build`` for a call of one library function on all parameters, then constants."""

    def build(scope, *params):
        call = library.call(name, [*params, *constants], result)
        value = scope.emit(call)
        return TupleGetItem(value, 0) if isinstance(result, relax.TupleType) else value

    return build


def _geometry(*values):
    return [ShapeExpr(value) if isinstance(value, list) else relax.prim_value(value) for value in values]


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed):
    x, weight = draw(2, 4, 7, 6), draw(4, 3, 3, 2, seed=1) if transposed else draw(6, 2, 3, 2, seed=1)
    groups = 2
    stride, padding, dilation, output_padding = [2, 2], [1, 0], [1, 2], [1, 0] if transposed else [0, 0]

    def theirs(x, weight):
        args = (x, weight, None, stride, padding, dilation, transposed, output_padding, groups)
        return torch.ops.aten.convolution(*args)

    geometry = _geometry(stride, padding, dilation, output_padding, int(transposed), groups)
    check(_call("convolution", tensor_type(theirs(x, weight)), *geometry), theirs, x, weight)


def test_pooling():
    x = draw(2, 3, 7, 6)

    def both(y):
        return relax.TupleType([tensor_type(y), relax.TensorType(tuple(y.shape), "int64")])

    def largest(x):
        return F.max_pool2d(x, 3, 2, 1)

    geometry = _geometry([3, 3], [2, 2], [1, 1], [1, 1], 0)
    check(_call("max_pool", both(largest(x)), *geometry), largest, x)

    def adaptive_largest(x):
        return F.adaptive_max_pool2d(x, (3, 2))

    check(_call("adaptive_max_pool", both(adaptive_largest(x)), ShapeExpr([3, 2])), adaptive_largest, x)

    def average(x):
        return F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)

    check(_call("avg_pool", tensor_type(average(x)), *_geometry([3, 3], [2, 2], [1, 1], 0, 0, 0)), average, x)

    def adaptive_average(x):
        return F.adaptive_avg_pool2d(x, (3, 4))

    check(_call("adaptive_avg_pool", tensor_type(adaptive_average(x)), ShapeExpr([3, 4])), adaptive_average, x)


def test_index():
    x, i, j = draw(3, 4, 5), torch.tensor([[0], [-1]]), torch.tensor([1, 1])

    def build(scope, x, i, j):
        indices = scope.emit(relax.Tuple([i, j]))
        args = [x, ShapeExpr([0, 2]), indices]
        return library.call("index", args, relax.TensorType((2, 2, 4), "float64"))

    check(build, lambda x, i, j: x[i, :, j], x, i, j)


@pytest.mark.parametrize("name", ["log1p", "expm1", "erfc"])
def test_element_wise(name):
    x = draw(3, 4, low=-0.9)
    check(_call(name, tensor_type(x)), getattr(torch, name), x)
