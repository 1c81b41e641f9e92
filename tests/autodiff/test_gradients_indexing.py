"""Gradients of gathering, scattering, losses, convolutions and library functions, against torch.autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op

from autodiff import clean, differentiate
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import check, draw


def _integers(*extents: int, below: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(below, extents, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("indices", [(), (1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take(axis, indices):
    def theirs(x, i):
        picked = x.index_select(axis % 3, i.reshape(-1))
        return picked.reshape(*x.shape[: axis % 3], *i.shape, *x.shape[axis % 3 + 1 :])

    check(lambda scope, p, i: op.take(p, i, axis), theirs, draw(3, 4, 5), _integers(*indices, below=3))


def test_take_of_the_flattened_and_clipped():
    check(lambda scope, p, i: op.take(p, i), lambda x, i: x[i], draw(6), _integers(4, below=6))
    wild = torch.tensor([-4, 0, 2, 9])
    check(lambda scope, p, i: op.take(p, i, 0, "clip"), lambda x, i: x[i.clamp(0, 2)], draw(3, 2), wild)
    check(lambda scope, p, i: op.take(p, i, 0, "wrap"), lambda x, i: x[i % 3], draw(3, 2), wild)


@pytest.mark.parametrize("axis", [0, 1])
def test_gather_and_scatter_elements(axis):
    x, indices, updates = draw(3, 4), _integers(2, 3, below=3), draw(2, 3, seed=1)
    check(lambda scope, p, i: op.gather_elements(p, i, axis), lambda x, i: x.gather(axis, i), x, indices)
    check(
        lambda scope, p, i, u: op.scatter_elements(p, i, u, axis, "add"),
        lambda x, i, u: x.scatter_add(axis, i, u),
        x,
        indices,
        updates,
    )
    permuted = torch.tensor([[0, 1, 2], [1, 2, 0]])  # 'update' is defined where indices do not collide
    check(
        lambda scope, p, i, u: op.scatter_elements(p, i, u, axis, "update"),
        lambda x, i, u: x.scatter(axis, i, u),
        x,
        permuted,
        updates,
    )


def test_gather_and_scatter_nd():
    x, indices = draw(3, 4, 2), torch.tensor([[0, 1], [2, 3], [0, 1]])
    check(lambda scope, p, i: op.gather_nd(p, i), lambda x, i: x[i[:, 0], i[:, 1]], x, indices)
    updates = draw(3, 2, seed=1)
    check(
        lambda scope, p, i, u: op.scatter_nd(p, i, u, "add"),
        lambda x, i, u: x.index_put((i[:, 0], i[:, 1]), u, accumulate=True),
        x,
        indices,
        updates,
    )


def test_index_tensor_and_index_put():
    x, i, j = draw(3, 4, 2), torch.tensor([[0, 2], [1, 0]]), torch.tensor([1, 3])
    check(lambda scope, p, i, j: op.index_tensor(p, [i, j]), lambda x, i, j: x[i, j], x, i, j)
    for accumulate in (True, False):
        check(
            lambda scope, p, i, v, accumulate=accumulate: op.index_put(p, (i,), v, accumulate),
            lambda x, i, v, accumulate=accumulate: x.index_put((i,), v, accumulate=accumulate),
            draw(5),
            torch.tensor([3, 0, 1]),
            draw(3, seed=1),
        )


def test_one_hot_has_no_gradient():
    def build(scope, p, i):
        hot = scope.emit(op.one_hot(i, relax.prim_value(1.0), relax.prim_value(0.0), 4))
        return op.multiply(p, scope.emit(op.astype(hot, "float64")))

    check(build, lambda x, i: x * F.one_hot(i, 4), draw(3, 4), _integers(3, below=4))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("extents", [(4, 3), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(reduction, extents, weighted):
    targets = _integers(extents[0], *extents[2:], below=3)
    targets.view(-1)[1] = 2
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    constant = relax.const(weights.numpy(), "float64") if weighted else None
    check(
        lambda scope, p, t: op.nn.nll_loss(p, t, constant, reduction, 2),
        lambda x, t: F.nll_loss(x, t, weights if weighted else None, reduction=reduction, ignore_index=2),
        draw(*extents),
        targets,
    )


def test_nll_loss_gradient_with_a_negative_ignore_index():
    """Only the gradient: TVM's own forward is not ours."""
    x, targets = draw(4, 3), torch.tensor([0, -100, 2, 1])
    func = function(lambda scope, p, t: op.nn.nll_loss(p, t), x, targets)
    joint = clean(differentiate(func, [0], [0]))
    leaf = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(F.nll_loss(leaf, targets), leaf)
    got = evaluate(joint, x, targets, torch.ones((), dtype=torch.float64))[1]
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=0)


def test_cross_entropy_with_logits():
    check(
        lambda scope, p, q: op.nn.cross_entropy_with_logits(p, q),
        lambda x, y: -(x * y).sum() / x.shape[0],
        draw(3, 4),
        draw(3, 4, seed=1),
    )


CONVOLUTIONS = {
    "plain": dict(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1),
    "strided": dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=1),
    "grouped": dict(stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=2),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    k = CONVOLUTIONS[name]
    check(
        lambda scope, x, w: op.nn.conv2d(x, w, k["stride"], k["padding"], k["dilation"], k["groups"]),
        lambda x, w: F.conv2d(x, w, None, **k),
        draw(2, 4, 7, 6),
        draw(6, 4 // k["groups"], 3, 2, seed=1),
    )


def test_convolutions_of_other_ranks():
    check(
        lambda s, x, w: op.nn.conv1d(x, w, 2, 1), lambda x, w: F.conv1d(x, w, None, 2, 1), draw(2, 3, 7), draw(4, 3, 3)
    )
    check(lambda s, x, w: op.nn.conv3d(x, w), lambda x, w: F.conv3d(x, w), draw(1, 2, 4, 4, 4), draw(3, 2, 2, 2, 2))
    check(
        lambda s, x, w: op.nn.conv2d_transpose(x, w, (2, 2), (1, 1), (1, 1)),
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1),
        draw(2, 3, 4, 4),
        draw(3, 4, 3, 3),
    )


def test_pooling():
    x = draw(2, 3, 6, 6)
    check(lambda s, p: op.nn.max_pool2d(p, (2, 2), (2, 2)), lambda x: F.max_pool2d(x, 2), x)
    check(lambda s, p: op.nn.max_pool2d(p, (3, 3), (2, 2), (1, 1)), lambda x: F.max_pool2d(x, 3, 2, 1), x)
    check(lambda s, p: op.nn.avg_pool2d(p, (2, 2), (2, 2)), lambda x: F.avg_pool2d(x, 2), x)
    check(lambda s, p: op.nn.adaptive_avg_pool2d(p, (1, 1)), lambda x: F.adaptive_avg_pool2d(x, 1), x)
    check(lambda s, p: op.nn.adaptive_avg_pool2d(p, (3, 2)), lambda x: F.adaptive_avg_pool2d(x, (3, 2)), x)
