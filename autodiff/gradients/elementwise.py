"""Gradients of elementwise functions of one tensor, and of two or three tensors that broadcast against each other.

``g`` is the gradient of the result ``y``. Where a function is not smooth the rule follows PyTorch's choice.
:func:`fit` sums ``g`` over the dimensions along which an operand was broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.relax import op

from autodiff.gradients.registry import Emit, const, fit, gradient, zeros_like
from autodiff.ir import Call, Constant, Expr, Var, dtype, is_float, numpy_value

_CONSTANT = "floor ceil round trunc sign isnan isinf isfinite logical_not bitwise_not equal not_equal less less_equal"
_CONSTANT += " greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
_CONSTANT += " full full_like zeros_like ones_like"


@gradient("library.divide_trunc", "library.divide_floor", *(f"relax.{name}" for name in _CONSTANT.split()))
def without_gradient(call: Call, y: Var, g: Var, emit: Emit) -> list[None]:
    """0: the result is piecewise constant, no float, or depends on the shapes alone (a fill is not differentiated)"""
    return [None] * len(call.args)


def _of_one(name: str, partial: Callable[[Expr, Var, Var], Expr], wide: bool = False) -> None:
    """Registers ``dx = partial(x, y, g)``."""

    @gradient(name, wide=wide)
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
        return [partial(call.args[0], y, g)]


_of_one("relax.negative", lambda x, y, g: op.negative(g))
_of_one("relax.log", lambda x, y, g: g / x)
_of_one("relax.cos", lambda x, y, g: op.negative(g) * op.sin(x))
_of_one("relax.sqrt", lambda x, y, g: const(0.5, y) * g / y)
_of_one("relax.square", lambda x, y, g: (const(2, x) * g) * x, wide=True)  # g is often one number per row
_of_one("relax.nn.relu", lambda x, y, g: op.where(op.less_equal(y, const(0, y)), zeros_like(y), g))  # 0 at 0, not g
_of_one("library.log1p", lambda x, y, g: g / (const(1, x) + x), wide=True)


def _unary(name: str, derivative: Callable[[Expr, Var], Expr], wide: bool = True) -> None:
    """Registers ``dx = g * derivative(x, y)``."""
    _of_one(name, lambda x, y, g: g * derivative(x, y), wide)


_unary("relax.sigmoid", lambda x, y: y * (const(1, x) - y))
_unary("relax.tanh", lambda x, y: const(1, x) - y * y)
_unary("relax.rsqrt", lambda x, y: const(-0.5, x) * (y * y * y))
_unary("relax.exp", lambda x, y: y, wide=False)
_unary("relax.sin", lambda x, y: op.cos(x), wide=False)
_unary("relax.tan", lambda x, y: const(1, x) + y * y)
_unary("relax.sinh", lambda x, y: op.cosh(x))
_unary("relax.cosh", lambda x, y: op.sinh(x))
_unary("relax.asin", lambda x, y: op.rsqrt(const(1, x) - x * x))
_unary("relax.acos", lambda x, y: op.negative(op.rsqrt(const(1, x) - x * x)))
_unary("relax.atan", lambda x, y: const(1, x) / (const(1, x) + x * x))
_unary("relax.asinh", lambda x, y: op.rsqrt(const(1, x) + x * x))
_unary("relax.acosh", lambda x, y: op.rsqrt(x * x - const(1, x)))
_unary("relax.atanh", lambda x, y: const(1, x) / (const(1, x) - x * x))
_unary("relax.abs", lambda x, y: op.sign(x), wide=False)  # 0 at 0, where TVM's own rule gives g
_unary("relax.erf", lambda x, y: const(2 / math.sqrt(math.pi), x) * op.exp(op.negative(x * x)))
_unary("library.erfc", lambda x, y: const(-2 / math.sqrt(math.pi), x) * op.exp(op.negative(x * x)))
_unary("library.expm1", lambda x, y: y + const(1, y))
_unary("library.exp2", lambda x, y: y * const(math.log(2), y))


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


def _binary(name: str, partials: Callable[[Expr, Expr, Var, Var], tuple[Expr, Expr]], wide: bool = True) -> None:
    """Registers ``da, db = partials(a, b, y, g)``, both still of the result's shape."""

    @gradient(name, wide=wide)
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
        return [fit(part, arg, emit) for part, arg in zip(partials(*call.args, y, g), call.args, strict=True)]


_binary("relax.add", lambda a, b, y, g: (g, g), wide=False)
_binary("relax.multiply", lambda a, b, y, g: (g * b, g * a), wide=False)
_binary("relax.divide", lambda a, b, y, g: (g / b, op.negative(g) * (a / b / b)))


@gradient("relax.subtract")
def subtract(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g, db = -g"""
    a, b = call.args
    return [fit(g, a, emit), op.negative(emit(fit(g, b, emit)))]


def _winner_takes(name: str, loses: Callable[[Expr, Expr], Expr]) -> None:
    """Registers the rule of an extremum: g to the winner, half of it each where both are equal.

    NaN neither loses nor ties, so both operands get g, as in PyTorch.
    """

    @gradient(name)
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
        a, b = call.args
        shared = emit(op.where(op.equal(a, b), g * const(0.5, g), g))
        zeros = emit(zeros_like(g))
        pairs = (a, loses(a, b)), (b, loses(b, a))
        return [fit(op.where(is_lost, zeros, shared), each, emit) for each, is_lost in pairs]


_winner_takes("relax.maximum", op.less)
_winner_takes("relax.minimum", lambda a, b: op.less(b, a))


@gradient("relax.power", wide=True)
def power(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """da = g b a^(b-1), 0 where b = 0; db = g y log(a), 0 where a = 0 and b >= 0"""
    a, b = call.args
    if isinstance(b, Constant) and numpy_value(b).size == 1:
        return [fit(_power_of_constant(a, float(numpy_value(b).item()), g), a, emit), None]
    zeros = emit(zeros_like(y))
    slope = g * (b * op.power(a, b - const(1, b)))
    da = op.where(op.equal(b, const(0, b)), zeros, slope)
    flat = op.logical_and(op.equal(a, const(0, a)), op.greater_equal(b, const(0, b)))
    db = g * op.where(flat, zeros, y * op.log(a))
    return [fit(da, a, emit), fit(db, b, emit)]


def _power_of_constant(a: Expr, b: float, g: Var) -> Expr:
    """The derivative with respect to a, without ``power`` where the exponent is 0, 1 or 2."""
    if b == 0:
        return zeros_like(g)
    if b == 1:
        return g
    base = a if b == 2 else op.power(a, const(b - 1, a))
    return g * (const(b, a) * base)


@gradient("relax.where")
def where(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """da = g where the condition holds, db = g where it does not"""
    condition, a, b = call.args
    zeros = emit(zeros_like(g))
    return [None, fit(op.where(condition, g, zeros), a, emit), fit(op.where(condition, zeros, g), b, emit)]
