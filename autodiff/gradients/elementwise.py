"""Gradients of functions of one tensor, element by element.

``g`` is the gradient of ``y = f(x)``. Where a function is not smooth the rule follows PyTorch's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.relax import op

from autodiff.gradients.registry import Emit, gradient
from autodiff.gradients.tools import const, zeros_like
from autodiff.ir import Call, Expr, Var, dtype, is_float

__all__ = []

_PIECEWISE_CONSTANT = (
    "relax.floor",
    "relax.ceil",
    "relax.round",
    "relax.trunc",
    "relax.sign",
    "relax.isnan",
    "relax.isinf",
    "relax.isfinite",
    "relax.logical_not",
    "relax.bitwise_not",
)


@gradient(*_PIECEWISE_CONSTANT)
def piecewise_constant(call: Call, y: Var, g: Var, emit: Emit) -> list[None]:
    """dx = 0"""
    return [None]


def _unary(name: str, derivative: Callable[[Expr, Var, Emit], Expr]) -> None:
    """Registers ``dx = g * derivative(x, y)``."""

    @gradient(name, wide=True)
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
        return [g * derivative(call.args[0], y, emit)]


_unary("relax.sigmoid", lambda x, y, emit: y * (const(1, x) - y))
_unary("relax.tanh", lambda x, y, emit: const(1, x) - y * y)
_unary("relax.rsqrt", lambda x, y, emit: const(-0.5, x) * (y * y * y))
_unary("relax.tan", lambda x, y, emit: const(1, x) + y * y)
_unary("relax.sinh", lambda x, y, emit: op.cosh(x))
_unary("relax.cosh", lambda x, y, emit: op.sinh(x))
_unary("relax.asin", lambda x, y, emit: op.rsqrt(const(1, x) - x * x))
_unary("relax.acos", lambda x, y, emit: op.negative(op.rsqrt(const(1, x) - x * x)))
_unary("relax.atan", lambda x, y, emit: const(1, x) / (const(1, x) + x * x))
_unary("relax.asinh", lambda x, y, emit: op.rsqrt(const(1, x) + x * x))
_unary("relax.acosh", lambda x, y, emit: op.rsqrt(x * x - const(1, x)))
_unary("relax.atanh", lambda x, y, emit: const(1, x) / (const(1, x) - x * x))


@gradient("relax.square", wide=True)
def square(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = 2 g x; the 2 goes to g, which is often one number per row"""
    (x,) = call.args
    return [(const(2, x) * g) * x]


@gradient("relax.abs")
def abs_(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g * sign(x), which is 0 at 0 (TVM's own rule gives g there)."""
    return [g * op.sign(call.args[0])]


@gradient("relax.erf", wide=True)
def erf(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g * 2 / sqrt(pi) * exp(-x^2)"""
    (x,) = call.args
    return [g * (const(2 / math.sqrt(math.pi), x) * op.exp(op.negative(x * x)))]


@gradient("relax.nn.gelu", wide=True)
def gelu(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g * (Phi(x) + x * phi(x)), with Phi = (1 + erf(x / sqrt 2)) / 2 and phi = exp(-x^2 / 2) / sqrt(2 pi)."""
    (x,) = call.args
    cdf = const(0.5, x) * (const(1, x) + op.erf(x * const(math.sqrt(0.5), x)))
    pdf = const(1 / math.sqrt(2 * math.pi), x) * op.exp(const(-0.5, x) * (x * x))
    return [g * (cdf + x * pdf)]


@gradient("relax.nn.gelu_tanh", wide=True)
def gelu_tanh(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g * ((1 + t) / 2 + x (1 - t^2) / 2 * k (1 + 3 c x^2)), t = tanh(k (x + c x^3)), k = sqrt(2 / pi)."""
    (x,) = call.args
    k, c = math.sqrt(2 / math.pi), 0.044715
    square = emit(x * x)
    t = emit(op.tanh(const(k, x) * (x + const(c, x) * square * x)))
    slope = (const(1, x) - t * t) * (const(k, x) + const(3 * k * c, x) * square)
    return [g * (const(0.5, x) * (const(1, x) + t + x * slope))]


@gradient("relax.nn.silu", wide=True)
def silu(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g * s * (1 + x * (1 - s)), s = sigmoid(x)"""
    (x,) = call.args
    s = emit(op.sigmoid(x))
    return [g * s * (const(1, x) + x * (const(1, x) - s))]


@gradient("relax.nn.softplus", wide=True)
def softplus(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g * sigmoid(beta x), and g where beta x > threshold"""
    (x,) = call.args
    scaled = emit(x * const(float(call.attrs.beta), x))
    linear = op.greater(scaled, const(float(call.attrs.threshold), x))
    return [op.where(linear, g, g * op.sigmoid(scaled))]


@gradient("relax.nn.relu")
def relu(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = 0 where y <= 0, else g (TVM's own rule gives g at 0)."""
    return [op.where(op.less_equal(y, const(0, y)), zeros_like(y), g)]


@gradient("relax.nn.leakyrelu")
def leakyrelu(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g where x > 0, else alpha * g"""
    (x,) = call.args
    return [op.where(op.greater(x, const(0, x)), g, g * const(float(call.attrs.alpha), x))]


@gradient("relax.nn.selu", wide=True)
def selu(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = scale * g where x > 0, else scale * alpha * exp(x) * g (Klambauer et al., 2017)"""
    (x,) = call.args
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    g = emit(g * const(scale, x))
    return [op.where(op.greater(x, const(0, x)), g, g * (const(alpha, x) * op.exp(x)))]


@gradient("relax.clip")
def clip(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g where min <= x <= max, else 0, nan included"""
    x, low, high = call.args
    inside = op.logical_and(op.greater_equal(x, const(low.value, x)), op.less_equal(x, const(high.value, x)))
    return [op.where(inside, g, zeros_like(x)), None, None]


@gradient("relax.astype")
def astype(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g in the type of x, nothing between integers and floats"""
    (x,) = call.args
    return [op.astype(g, dtype(x)) if is_float(x) and is_float(y) else None]
