"""Gradients of element-wise operators against torch.autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op

from autodiff import clean, differentiate
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import check, draw

# Zero, both signs, and numbers around the kinks of the piecewise functions.
KINKS = torch.tensor([-7.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 7.5], dtype=torch.float64)

UNARY = {
    "exp": (op.exp, torch.exp, draw(3, 4)),
    "log": (op.log, torch.log, draw(3, 4, low=0.1)),
    "negative": (op.negative, torch.neg, draw(3, 4)),
    "sin": (op.sin, torch.sin, draw(3, 4)),
    "cos": (op.cos, torch.cos, draw(3, 4)),
    "tan": (op.tan, torch.tan, draw(3, 4, low=-1, high=1)),
    "asin": (op.asin, torch.asin, draw(3, 4, low=-0.9, high=0.9)),
    "acos": (op.acos, torch.acos, draw(3, 4, low=-0.9, high=0.9)),
    "atan": (op.atan, torch.atan, draw(3, 4)),
    "sinh": (op.sinh, torch.sinh, draw(3, 4)),
    "cosh": (op.cosh, torch.cosh, draw(3, 4)),
    "tanh": (op.tanh, torch.tanh, KINKS),
    "asinh": (op.asinh, torch.asinh, draw(3, 4)),
    "acosh": (op.acosh, torch.acosh, draw(3, 4, low=1.1, high=3)),
    "atanh": (op.atanh, torch.atanh, draw(3, 4, low=-0.9, high=0.9)),
    "sigmoid": (op.sigmoid, torch.sigmoid, KINKS),
    "sqrt": (op.sqrt, torch.sqrt, draw(3, 4, low=0.1)),
    "sqrt_at_zero": (op.sqrt, torch.sqrt, torch.zeros(2, dtype=torch.float64)),
    "rsqrt": (op.rsqrt, torch.rsqrt, draw(3, 4, low=0.1)),
    "square": (op.square, torch.square, KINKS),
    "abs": (op.abs, torch.abs, KINKS),
    "sign": (op.sign, torch.sign, KINKS),
    "floor": (op.floor, torch.floor, KINKS),
    "ceil": (op.ceil, torch.ceil, KINKS),
    "round": (op.round, torch.round, KINKS),
    "trunc": (op.trunc, torch.trunc, KINKS),
    "erf": (op.erf, torch.erf, KINKS),
    "clip": (lambda x: op.clip(x, -1.0, 3.0), lambda x: x.clamp(-1.0, 3.0), KINKS),
    "relu": (op.nn.relu, torch.relu, KINKS),
    "leakyrelu": (lambda x: op.nn.leakyrelu(x, 0.125), lambda x: F.leaky_relu(x, 0.125), KINKS),
    "selu": (op.nn.selu, torch.selu, KINKS),
    "silu": (op.nn.silu, F.silu, KINKS),
    "gelu": (op.nn.gelu, F.gelu, KINKS),
    "gelu_tanh": (op.nn.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), KINKS),
    "softplus": (lambda x: op.nn.softplus(x, 2.0, 5.0), lambda x: F.softplus(x, 2.0, 5.0), KINKS),
    "scalar": (op.tanh, torch.tanh, torch.tensor(0.3, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    ours, theirs, x = UNARY[name]
    check(lambda scope, p: ours(p), theirs, x)


BINARY = {
    "add": (op.add, torch.add),
    "subtract": (op.subtract, torch.sub),
    "multiply": (op.multiply, torch.mul),
    "divide": (op.divide, torch.div),
    "maximum": (op.maximum, torch.maximum),
    "minimum": (op.minimum, torch.minimum),
    "power": (op.power, torch.pow),
    "floor_mod": (op.floor_mod, torch.remainder),
    "mod": (op.mod, torch.fmod),
    "atan2": (op.atan2, torch.atan2),
    "log_add_exp": (op.log_add_exp, torch.logaddexp),
}
SHAPES = [
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((4,), (3, 4)),
    ((3, 1), (1, 4)),
    ((2, 1, 4), (3, 1)),
    ((), (3,)),
    ((3,), ()),
]
SHAPES += [((1, 3), (3,)), ((), ()), ((1,), (1, 1))]


# Broadcasting is one function: the basic operators try every pair of shapes, the others two.
BASIC = ("add", "subtract", "multiply", "divide", "maximum")
PAIRS = [(name, pair) for name in BINARY for pair in (SHAPES if name in BASIC else (SHAPES[0], SHAPES[4]))]


@pytest.mark.parametrize("name,shapes", PAIRS, ids=str)
def test_binary(name, shapes):
    ours, theirs = BINARY[name]
    a, b = draw(*shapes[0], low=0.2, seed=1), draw(*shapes[1], low=0.2, seed=2)
    check(lambda scope, p, q: ours(p, q), theirs, a, b)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_ties_share_the_gradient(name):
    ours, theirs = BINARY[name]
    a = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    check(lambda scope, p, q: ours(p, q), theirs, a, torch.tensor([[2.0], [3.0]], dtype=torch.float64))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, -1.0, 0.5, 1.5])
def test_power_of_a_constant(exponent):
    x = KINKS if exponent == int(exponent) and exponent >= 0 else draw(5, low=0.3)
    check(lambda scope, p: op.power(p, relax.const(exponent, "float64")), lambda x: x**exponent, x)


def test_power_at_zero_and_below():
    base = torch.tensor([0.0, 0.0, 0.0, -2.0, -2.0, 1.5], dtype=torch.float64)
    exponent = torch.tensor([0.0, 1.0, 2.5, 2.0, 3.0, 0.0], dtype=torch.float64)
    check(lambda scope, p, q: op.power(p, q), torch.pow, base, exponent)


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4), (3, 4)), ((3, 1), (4,), ()), ((4,), (3, 1), (2, 1, 1))], ids=str)
def test_where(shapes):
    condition = draw(*shapes[0]) > 0
    check(lambda scope, c, p, q: op.where(c, p, q), torch.where, condition, draw(*shapes[1]), draw(*shapes[2], seed=2))


def test_operators_without_gradient_stop_it():
    x, y = draw(3, 4), draw(3, 4, seed=1)

    def build(scope, p, q):
        greater = scope.emit(op.astype(scope.emit(op.greater(p, q)), "float64"))
        nonzero = scope.emit(op.logical_not(scope.emit(op.equal(p, q))))
        integers = scope.emit(op.astype(scope.emit(op.astype(p, "int64")), "float64"))
        floored = scope.emit(op.floor_divide(p, q))
        terms = scope.emit(op.add(scope.emit(op.add(greater, integers)), scope.emit(op.multiply(p, q))))
        return [scope.emit(op.add(terms, floored)), nonzero]

    def reference(p, q):
        return [(p > q).double() + p.long().double() + p * q + (p / q).floor(), ~(p == q)]

    check(build, reference, x, y)


@pytest.mark.parametrize("count", [1, 3])
def test_prelu(count):
    check(lambda scope, x, w: op.nn.prelu(x, w, 1), F.prelu, draw(2, 3, 4), draw(count, seed=1))


def test_casts_between_floating_point_types():
    def build(scope, p):
        return op.astype(scope.emit(op.exp(scope.emit(op.astype(p, "float64")))), "float32")

    check(build, lambda p: p.double().exp().float(), draw(3, 4).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "softplus"])
def test_float32_gradients_far_out_are_accurate(name):
    ours, theirs, _ = UNARY[name]
    x = torch.tensor([-30.0, -12.0, -6.0, 6.0, 12.0, 30.0])
    (got, exact) = _gradients(ours, theirs, x)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "silu", "softplus"])
def test_half_gradients_are_rounded_once(name, dtype):
    ours, theirs, _ = UNARY[name]
    got, exact = _gradients(ours, theirs, draw(64, low=-4, high=4).to(dtype))
    torch.testing.assert_close(got, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def _gradients(ours, theirs, x):
    """The gradient of the sum by our rule, and by torch in float64."""
    joint = clean(differentiate(function(lambda scope, p: ours(p), x), [0], [0]))
    leaf = x.double().requires_grad_()
    return evaluate(joint, x, torch.ones_like(x))[1], torch.autograd.grad(theirs(leaf).sum(), leaf)[0]
