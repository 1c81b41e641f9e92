"""Gradients of functions of two or three tensors that broadcast against each other.

``g`` is the gradient of the result; :func:`fit` sums it over the dimensions along which an operand was broadcast.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.relax import op

from autodiff.extents import same_shape
from autodiff.gradients.registry import Emit, gradient
from autodiff.gradients.tools import const, fit, zeros_like
from autodiff.ir import Call, Constant, Expr, Var, numpy_value, shape

__all__ = []

_WITHOUT_GRADIENT = (
    *(f"relax.{name}" for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")),
    *(f"relax.{name}" for name in ("logical_and", "logical_or", "logical_xor")),
    *(f"relax.{name}" for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")),
    "relax.floor_divide",
)


@gradient(*_WITHOUT_GRADIENT)
def without_gradient(call: Call, y: Var, g: Var, emit: Emit) -> list[None]:
    """da = db = 0"""
    return [None, None]


def _binary(name: str, partials: Callable[[Expr, Expr, Var, Var], tuple[Expr, Expr]], wide: bool = True) -> None:
    """Registers ``da, db = partials(a, b, y, g)``, both still of the result's shape."""

    @gradient(name, wide=wide)
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
        return [fit(part, arg, emit) for part, arg in zip(partials(*call.args, y, g), call.args, strict=True)]


_binary("relax.add", lambda a, b, y, g: (g, g), wide=False)
_binary("relax.multiply", lambda a, b, y, g: (g * b, g * a), wide=False)
_binary("relax.divide", lambda a, b, y, g: (g / b, op.negative(g) * (a / b / b)))
_binary("relax.mod", lambda a, b, y, g: (g, op.negative(g) * op.trunc(a / b)))
_binary("relax.floor_mod", lambda a, b, y, g: (g, op.negative(g) * op.floor(a / b)))
_binary("relax.log_add_exp", lambda a, b, y, g: (g * op.sigmoid(a - b), g * op.sigmoid(b - a)))


@gradient("relax.subtract")
def subtract(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g, db = -g"""
    a, b = call.args
    return [fit(g, a, emit), op.negative(emit(fit(g, b, emit)))]


@gradient("relax.atan2", wide=True)
def atan2(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b / (a^2 + b^2), db = -g a / (a^2 + b^2)"""
    a, b = call.args
    scaled = emit(g / (a * a + b * b))
    return [fit(scaled * b, a, emit), fit(op.negative(scaled) * a, b, emit)]


@gradient("relax.maximum")
def maximum(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g where a > b, db = g where b > a, half of g each where they are equal"""
    a, b = call.args
    return _winner_takes(a, b, op.less(a, b), op.less(b, a), g, emit)


@gradient("relax.minimum")
def minimum(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g where a < b, db = g where b < a, half of g each where they are equal"""
    a, b = call.args
    return _winner_takes(a, b, op.less(b, a), op.less(a, b), g, emit)


def _winner_takes(a: Expr, b: Expr, a_loses: Expr, b_loses: Expr, g: Var, emit: Emit) -> list[Expr]:
    """NaN neither loses nor ties, so that both operands get g, as in PyTorch."""
    shared = emit(op.where(op.equal(a, b), g * const(0.5, g), g))
    zeros = emit(zeros_like(g))
    return [
        fit(op.where(a_loses, zeros, shared), a, emit),
        fit(op.where(b_loses, zeros, shared), b, emit),
    ]


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
    """The slope, without the power where it is 0, 1 or the base itself."""
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


@gradient("relax.nn.prelu")
def prelu(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g where x > 0, else alpha g; dalpha = sum of x g where x <= 0"""
    x, alpha = call.args
    axis = int(call.attrs.axis) % len(shape(x))
    extents = [extent if dim == axis else 1 for dim, extent in enumerate(shape(x))]
    slope = emit(op.reshape(alpha, [1] * len(extents) if same_shape(shape(alpha), (1,)) else extents))
    positive = emit(op.greater(x, const(0, x)))
    dalpha = emit(fit(op.where(positive, zeros_like(x), x * g), slope, emit))
    return [op.where(positive, g, slope * g), op.reshape(dalpha, shape(alpha))]
