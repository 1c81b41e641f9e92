"""Normalizations differentiated as one step: right gradients, from the normalized values and rstd alone."""

from __future__ import annotations

import pytest
import torch
from tvm.relax import op

from autodiff import clean, differentiate
from autodiff.body import const
from autodiff.ir import bindings, used_vars
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import check, draw


def moments(scope, x, axes, *, centre=True, square=op.square, second_axes=None):
    """``y``, ``mean`` and ``rstd`` of ``x``, spelled out."""
    mean = scope.emit(op.mean(x, axes, keepdims=True), "mean")
    centred = scope.emit(op.subtract(x, mean), "centred") if centre else x
    moment = scope.emit(op.mean(scope.emit(square(centred)), second_axes or axes, keepdims=True), "moment")
    rstd = scope.emit(op.rsqrt(scope.emit(op.add(moment, const(1e-3, moment)))), "rstd")
    return scope.emit(op.multiply(centred, rstd), "y"), mean, rstd


def torch_moments(x, axes, *, centre=True, second_axes=None):
    mean = x.mean(axes, keepdim=True)
    centred = x - mean if centre else x
    rstd = (centred.square().mean(second_axes or axes, keepdim=True) + 1e-3).rsqrt()
    return centred * rstd, mean, rstd


def read_by_gradients(func, required=(0,)) -> set[str]:
    """The forward's variables that the gradients of the first result read."""
    forward = {var.name for var, _ in bindings(func)}
    joint = clean(differentiate(func, [0], list(required)))
    return {
        read.name for var, value in bindings(joint) if var.name not in forward for read in used_vars(value)
    } & forward


SQUARES = {"square": op.square, "product": lambda x: op.multiply(x, x), "power": lambda x: op.power(x, const(2.0, x))}


@pytest.mark.parametrize("centre", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("axes", [[2], [1, 2], [0, 2], [0, 1, 2]], ids=str)
def test_gradients(axes, centre):
    x = draw(3, 2, 5)
    check(lambda s, x: moments(s, x, axes, centre=centre)[0], lambda x: torch_moments(x, axes, centre=centre)[0], x)


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("centre", [True, False], ids=["LayerNorm", "RMSNorm"])
def test_gradients_read_the_normalized_values_and_rstd_alone(centre, square):
    build = function(lambda s, x: moments(s, x, [1], centre=centre, square=SQUARES[square])[0], draw(3, 4))
    assert read_by_gradients(build) == {"y", "rstd"}


def test_statistics_that_are_results_keep_their_gradients():
    x = draw(3, 4)
    check(lambda s, x: list(moments(s, x, [1])), lambda x: torch_moments(x, [1]), x)
    check(lambda s, x: list(moments(s, x, [1], centre=False)), lambda x: torch_moments(x, [1], centre=False), x)


def test_two_values_scaled_by_one_rstd():
    def build(scope, x, z):
        y, _, rstd = moments(scope, x, [1])
        return [y, op.multiply(z, rstd)]

    def reference(x, z):
        y, _, rstd = torch_moments(x, [1])
        return [y, z * rstd]

    check(build, reference, draw(3, 4), draw(3, 4, seed=1))


def test_an_axis_of_one_element():
    check(lambda s, x: moments(s, x, [2])[0], lambda x: torch_moments(x, [2])[0], draw(1, 3, 1))
    check(lambda s, x: moments(s, x, [2])[0], lambda x: torch_moments(x, [2])[0], draw(1, 1, 4))


def test_other_axes_for_mean_and_variance_are_another_function():
    x = draw(3, 4, 5)
    check(
        lambda s, x: moments(s, x, [1, 2], second_axes=[2])[0],
        lambda x: torch_moments(x, [1, 2], second_axes=[2])[0],
        x,
    )


def test_a_mean_through_which_no_gradient_flows():
    def build(scope, x):
        mean = scope.emit(op.grad.no_grad(scope.emit(op.mean(x, [1], keepdims=True))))
        centred = scope.emit(op.subtract(x, mean))
        moment = scope.emit(op.mean(scope.emit(op.square(centred)), [1], keepdims=True))
        return op.multiply(scope.emit(op.rsqrt(moment)), centred)

    def reference(x):
        centred = x - x.mean(1, keepdim=True).detach()
        return centred.square().mean(1, keepdim=True).rsqrt() * centred

    check(build, reference, draw(3, 4))


def test_a_variance_through_which_no_gradient_flows():
    def build(scope, x):
        moment = scope.emit(op.mean(scope.emit(op.square(x)), [1], keepdims=True))
        return op.multiply(x, scope.emit(op.rsqrt(scope.emit(op.grad.no_grad(moment)))))

    check(build, lambda x: x * x.square().mean(1, keepdim=True).detach().rsqrt(), draw(3, 4))


def test_a_power_other_than_two_is_another_function():
    def build(scope, x):
        moment = scope.emit(op.mean(scope.emit(op.power(x, const(4.0, x))), [1], keepdims=True))
        return op.multiply(x, scope.emit(op.rsqrt(moment)))

    check(build, lambda x: x * x.pow(4).mean(1, keepdim=True).rsqrt(), draw(3, 4))


def test_half_types_are_rounded_once():
    x = draw(4, 64)
    gradients = {}
    for kind in (torch.float16, torch.float64):
        leaf = x.to(torch.float16).to(kind).requires_grad_()
        torch_moments(leaf, [1])[0].backward(draw(4, 64, seed=2).to(torch.float16).to(kind))
        gradients[kind] = leaf.grad.double()
    func = function(lambda s, x: moments(s, x, [1])[0], x.half())
    got = evaluate(clean(differentiate(func, [0], [0])), x.half(), draw(4, 64, seed=2).half())[1].double()
    own, eager = ((found - gradients[torch.float64]).abs().max() for found in (got, gradients[torch.float16]))
    assert own <= 2 * eager + 1e-4
