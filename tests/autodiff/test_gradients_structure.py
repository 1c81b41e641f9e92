"""Gradients of reductions, matrix products, and operators that move elements, against torch.autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import TupleGetItem, op

from autodiff import clean, differentiate
from autodiff.ir import bindings, op_name, shape
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import check, draw

AXES = [None, [0], [-1], [0, 2], [1]]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "variance", "std", "prod"])
def test_reduction(name, axes, keepdims):
    dims = tuple(range(3)) if axes is None else tuple(axes)
    theirs = {
        "sum": lambda x: x.sum(dims, keepdim=keepdims),
        "mean": lambda x: x.mean(dims, keepdim=keepdims),
        "max": lambda x: x.amax(dims, keepdim=keepdims),
        "min": lambda x: x.amin(dims, keepdim=keepdims),
        "variance": lambda x: x.var(dims, correction=0, keepdim=keepdims),
        "std": lambda x: x.std(dims, correction=0, keepdim=keepdims),
        "prod": lambda x: _prod(x, dims, keepdims),
    }[name]
    check(lambda scope, p: getattr(op, name)(p, axes, keepdims), theirs, draw(2, 3, 4))


def _prod(x, dims, keepdims):
    for dim in sorted((d % 3 for d in dims), reverse=True):
        x = x.prod(dim, keepdim=keepdims)
    return x


def test_reduction_of_size_one_and_of_a_scalar():
    check(lambda scope, p: op.sum(p, [1]), lambda x: x.sum(1), draw(3, 1))
    check(lambda scope, p: op.max(p, [1]), lambda x: x.amax(1), draw(3, 1))
    check(lambda scope, p: op.sum(p), torch.sum, draw())


@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_of_extrema_share(name):
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    check(lambda scope, p: getattr(op, name)(p, [1]), lambda x: getattr(x, "a" + name)(1), x)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products_with_zeros(zeros):
    x = draw(2, 4)
    x[0, :zeros] = 0
    check(lambda scope, p: op.prod(p, [1]), lambda x: x.prod(1), x)
    check(lambda scope, p: op.cumprod(p, 1), lambda x: x.cumprod(1), x)


def test_exclusive_cumprod():
    x = draw(2, 4)
    check(
        lambda scope, p: op.cumprod(p, 1, exclusive=True),
        lambda x: torch.cat([torch.ones(2, 1).double(), x.cumprod(1)[:, :-1]], 1),
        x,
    )


@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_cumulative(axis):
    def flat(x):
        return x.reshape(-1) if axis is None else x

    dim = 0 if axis is None else axis
    check(lambda scope, p: op.cumsum(p, axis), lambda x: flat(x).cumsum(dim), draw(2, 3))
    check(lambda scope, p: op.cumprod(p, axis), lambda x: flat(x).cumprod(dim), draw(2, 3))
    check(lambda scope, p: op.cumsum(p, axis, exclusive=True), lambda x: flat(x).cumsum(dim) - flat(x), draw(2, 3))


def test_standard_deviation_of_equal_elements_has_gradient_zero():
    check(lambda scope, p: op.std(p, [1]), lambda x: x.std(1, correction=0), torch.ones(2, 3, dtype=torch.float64))


def test_variance_in_float32_with_a_large_mean():
    x = (draw(4, 64) * 0.01 + 1000).float()
    leaf = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(leaf.var(1, correction=0).sum(), leaf)
    joint = clean(differentiate(function(lambda scope, p: op.variance(p, [1]), x), [0], [0]))
    torch.testing.assert_close(evaluate(joint, x, torch.ones(4))[1].double(), exact, rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(axis):
    check(lambda scope, p: op.nn.softmax(p, axis), lambda x: x.softmax(axis), draw(2, 3, 4))
    check(lambda scope, p: op.nn.log_softmax(p, axis), lambda x: x.log_softmax(axis), draw(2, 3, 4))


MATMULS = [
    ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4)), ((6, 5, 2, 3), (3, 4)), ((6, 5, 2, 3), (5, 3, 4)),
    ((1, 5, 2, 3), (6, 1, 3, 4)), ((5, 1, 3), (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", MATMULS, ids=str)
def test_matmul(shapes):
    check(lambda scope, a, b: op.matmul(a, b), torch.matmul, draw(*shapes[0]), draw(*shapes[1], seed=1))


def test_weight_gradient_is_one_product_of_two_matrices():
    def linear(scope, x, weight):
        return op.matmul(x, scope.emit(op.permute_dims(weight)))

    joint = clean(differentiate(function(linear, draw(5, 2, 3), draw(4, 3)), [0], [1]))
    products = [value for _, value in bindings(joint) if op_name(value) == "relax.matmul"]
    assert [shape(arg) for arg in products[1].args] == [(4, 10), (10, 3)]


@pytest.mark.parametrize("text", "ij,jk->ik ij,ij-> bij,bjk->bik ij,k->ik ij->ji i,j->ij ij->i ij,jk".split())
def test_einsum(text):
    sizes = dict(i=2, j=3, k=4, b=5)
    inputs = text.split("->")[0].split(",")
    args = [draw(*(sizes[letter] for letter in letters), seed=seed) for seed, letters in enumerate(inputs)]
    check(lambda scope, *p: op.einsum(list(p), text), lambda *x: torch.einsum(text, *x), *args)


def test_outer_and_linear():
    check(lambda scope, a, b: op.outer(a, b), torch.outer, draw(3), draw(4))


MOVES = {
    "reshape": (lambda p: op.reshape(p, (4, 6)), lambda x: x.reshape(4, 6)),
    "flatten": (op.flatten, torch.flatten),
    "expand_dims": (lambda p: op.expand_dims(p, [0, -1]), lambda x: x[None, ..., None]),
    "permute_dims": (lambda p: op.permute_dims(p, [2, 0, -2]), lambda x: x.permute(2, 0, 1)),
    "reverse_dims": (lambda p: op.permute_dims(p), lambda x: x.permute(2, 1, 0)),
    "broadcast_to": (lambda p: op.broadcast_to(p, (5, 2, 3, 4)), lambda x: x.expand(5, 2, 3, 4)),
    "tril": (lambda p: op.tril(p, 1), lambda x: x.tril(1)),
    "triu": (lambda p: op.triu(p, -1), lambda x: x.triu(-1)),
    "flip": (lambda p: op.flip(p, 1), lambda x: x.flip(1)),
    "tile": (lambda p: op.tile(p, (2, 1, 3)), lambda x: x.tile(2, 1, 3)),
    "tile_more": (lambda p: op.tile(p, (2, 1, 1, 2)), lambda x: x.tile(2, 1, 1, 2)),
    "repeat": (lambda p: op.repeat(p, 3, 1), lambda x: x.repeat_interleave(3, 1)),
    "repeat_flat": (lambda p: op.repeat(p, 2), lambda x: x.repeat_interleave(2)),
    "pad": (lambda p: op.nn.pad(p, [0, 1, 2, 0, 1, 1]), lambda x: F.pad(x, (1, 1, 2, 0, 0, 1))),
    "slice": (lambda p: op.strided_slice(p, [1], [1], [3]), lambda x: x[:, 1:3]),
    "slice_step": (lambda p: op.strided_slice(p, [0, 2], [0, 0], [2, 4], [1, 3]), lambda x: x[:, :, ::3]),
    "slice_step_inside": (lambda p: op.strided_slice(p, [2], [1], [4], [2]), lambda x: x[:, :, 1:4:2]),
    "slice_one": (lambda p: op.strided_slice(p, [2], [3], [4], [5]), lambda x: x[:, :, 3:4]),
    "slice_negative": (lambda p: op.strided_slice(p, [-1], [-3], [-1]), lambda x: x[..., -3:-1]),
    "slice_backwards": (lambda p: op.strided_slice(p, [2], [3], [-5], [-2]), lambda x: x[..., [3, 1]]),
    "slice_beyond": (lambda p: op.strided_slice(p, [1], [1], [100]), lambda x: x[:, 1:]),
    "topk": (
        lambda p: op.topk(p, 2, 2, "both", True, "int64"),
        lambda x: list(x.topk(2, 2)),
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_elements(name):
    ours, theirs = MOVES[name]

    def build(scope, p):
        value = scope.emit(ours(p))
        if isinstance(value.ty, relax.TupleType):
            return [TupleGetItem(value, index) for index in range(len(value.ty.fields))]
        return value

    check(build, theirs, draw(2, 3, 4))


@pytest.mark.parametrize("axis", [None, [0], [0, 2], [-1]], ids=str)
def test_squeeze(axis):
    theirs = torch.squeeze if axis is None else lambda x: x.squeeze(tuple(axis))
    check(lambda scope, p: op.squeeze(p, axis), theirs, draw(1, 3, 1))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_split_stack(axis):
    x, y = draw(2, 4), draw(2, 4, seed=1)
    check(lambda scope, p, q: op.concat([p, q, p], axis), lambda x, y: torch.cat([x, y, x], axis), x, y)
    check(lambda scope, p, q: op.stack([p, q, p], axis), lambda x, y: torch.stack([x, y, x], axis), x, y)

    def split(scope, p):
        parts = scope.emit(op.split(p, 2, axis))
        return [op.tanh(scope.emit(TupleGetItem(parts, 1)))]

    check(split, lambda x: x.chunk(2, axis)[1].tanh(), x)

    def uneven(scope, p):
        parts = scope.emit(op.split(p, [1], axis))
        return [TupleGetItem(parts, 0), TupleGetItem(parts, 1)]

    check(uneven, lambda x: list(x.tensor_split([1], axis)), x)


def test_meshgrid():
    def build(scope, p, q):
        grid = scope.emit(op.meshgrid([p, q], "ij"))
        return [TupleGetItem(grid, 0), TupleGetItem(grid, 1)]

    check(build, lambda x, y: list(torch.meshgrid(x, y, indexing="ij")), draw(2), draw(3))


def test_slice_scatter():
    def theirs(x, y):
        return torch.slice_scatter(x, y, 1, 1, 4, 2)

    check(lambda scope, p, q: op.slice_scatter(p, q, 1, 4, 2, 1), theirs, draw(2, 5), draw(2, 2))
