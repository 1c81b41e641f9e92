"""Activations → Relax, with the gradients of torch's backward formulas at kinks, infinities and nan.

Explicit derivatives: a value and a function linear in the inputs → the value, with the linear function's gradient.
The chain rule through the operators of a value multiplies in another order than torch's backward formula. The results
differ where a factor is infinite or zero, or where digits cancel; the conversion then contains torch's formula.

Subgradients: a kink → the derivative that this version of torch takes, by a call of autograd. Eager training takes the
same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from tvm import relax

from autodiff.ir import Expr, dtype, is_float, shape
from autodiff.library import call as library_call
from bridge.aten.registry import converts, rounds_once
from bridge.base.devices import HOST, current_device
from bridge.base.modes import autocast_to
from bridge.base.quirks import quirk
from bridge.base.torch_internals import aten

op = relax.op


def with_derivative(importer, value: Expr, linear: Expr) -> Expr:
    """``value`` with the gradient of ``linear``, of the same type; operands of ``linear`` alone are never computed."""
    value, linear = importer.emit(op.grad.no_grad(value)), importer.emit(linear)
    return importer.emit(library_call("with_derivative", [value, linear], value.ty))


def with_slope(importer, value: Expr, x: Expr, slope: Expr) -> Expr:
    """``value`` with the gradient ``g * slope`` with respect to ``x``."""
    return with_derivative(importer, value, times(importer, x, slope))


def times(importer, x: Expr, slope: Expr) -> Expr:
    """A term of a linear function of ``x``: its product with a slope that has no gradient of its own."""
    return importer.emit(op.multiply(x, importer.emit(op.grad.no_grad(importer.emit(slope)))))


def where(importer, condition: Expr, x: Expr, y: Expr) -> Expr:
    """A selection, emitted."""
    return importer.emit(op.where(importer.emit(condition), importer.emit(x), importer.emit(y)))


def scaled(importer, x: Expr, factor: float) -> Expr:
    """``x`` times a number; ``x`` itself for 1."""
    return x if factor == 1 else importer.emit(op.multiply(x, importer.constant(factor, dtype(x))))


_NAN = float("nan")


def _gradients(function: Callable[..., torch.Tensor], *operands: list[float]) -> list[list[float]]:
    """Gradients of the sum of a function's result, in any grad mode."""
    with torch.inference_mode(False), torch.enable_grad(), autocast_to(None):
        leaves = [torch.tensor(values, dtype=torch.float64, device=HOST, requires_grad=True) for values in operands]
        grads = torch.autograd.grad(function(*leaves).sum(), leaves)
    return [grad.tolist() for grad in grads]


@quirk(
    "torch.clamp",
    reason="its gradient at a bound was 1 and is 0 from 2.14 on",
    test="tests/bridge/aten/test_subgradients.py::test_clamp_at_its_bounds",
)
@functools.cache
def clamp_at_bound() -> float | None:
    """Gradient of ``clamp`` at its bounds, 1.0 or 0.0; ``None`` if it depends on the bound."""
    (found,) = _gradients(lambda x: x.clamp(-1.0, 2.0), [-1.0, 2.0])
    return found[0] if found in ([0.0, 0.0], [1.0, 1.0]) else None


@quirk(
    "torch.fmax, torch.fmin",
    reason="of two equal operands, the first got the gradient; from 2.14 on, each gets half",
    test="tests/bridge/aten/test_subgradients.py::test_fmax_at_ties",
)
@functools.cache
def fmax_prefers_first() -> bool:
    """Whether ``fmax`` and ``fmin`` give a tie's whole gradient to the first operand; nan loses against a number."""
    operands = [0.5, _NAN, 3.0, _NAN], [0.5, 1.0, _NAN, _NAN]
    expected = [[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    return all(_gradients(function, *operands) == expected for function in (torch.fmax, torch.fmin))


@quirk(
    "F.softshrink",
    reason="some versions round the bound to the half type of the input",
    test="tests/bridge/aten/test_singular.py",
)
@functools.cache
def softshrink_rounds_its_bound() -> bool:
    """Whether ``softshrink`` on the CPU rounds the bound to the half type of its input; a GPU's kernel does."""
    with torch.inference_mode(False), torch.no_grad(), autocast_to(None):
        above = torch.tensor(0.1, dtype=torch.bfloat16, device=HOST)  # is 0.1001
        return torch.nn.functional.softshrink(above, 0.1).item() == 0


def _constants(importer, x, *values):
    return [importer.constant(value, dtype(x)) for value in values]


@converts(aten.hardtanh.default)
def hardtanh(importer, node, x, lower=-1, upper=1):
    """The gradient is zero at the bounds themselves; at nan it is g."""
    low, high = _constants(importer, x, lower, upper)
    number = float if is_float(x) else int
    value = importer.emit(op.clip(x, relax.prim_value(number(lower)), relax.prim_value(number(upper))))
    if not is_float(x):
        return value
    below, above = importer.emit(op.less_equal(x, low)), importer.emit(op.greater_equal(x, high))
    linear = where(importer, op.logical_or(below, above), op.grad.no_grad(x), x)
    return with_derivative(importer, value, linear)


def _held(node, bound):
    """A bound rounded to the input's type, if that is a half type."""
    element_type = node.args[0].meta["val"].dtype
    half = element_type in (torch.float16, torch.bfloat16)
    return torch.tensor(bound, dtype=element_type, device=HOST).item() if half else bound


@converts(aten.threshold.default)
@rounds_once
def threshold(importer, node, x, bound, value):
    bound, value = _constants(importer, x, bound if current_device() == HOST else _held(node, bound), value)
    return where(importer, op.less_equal(x, bound), value, x)


@converts(aten.softshrink.default)
@rounds_once
def softshrink(importer, node, x, bound=0.5):
    """The gradient is zero within the bounds, and g at nan."""
    bound = _held(node, bound) if current_device() != HOST or softshrink_rounds_its_bound() else bound
    low, high, zero = _constants(importer, x, -bound, bound, 0)
    inner = where(importer, op.less(x, low), op.add(x, high), op.multiply(x, zero))
    value = where(importer, op.greater(x, high), op.subtract(x, high), inner)
    within = op.logical_and(importer.emit(op.greater_equal(x, low)), importer.emit(op.less_equal(x, high)))
    return with_derivative(importer, value, where(importer, within, op.grad.no_grad(x), x))


@converts(aten.leaky_relu.default)
@rounds_once
def leaky_relu(importer, node, x, slope=0.01):
    (zero,) = _constants(importer, x, 0)
    return where(importer, op.greater(x, zero), x, scaled(importer, x, slope))


@converts(aten._prelu_kernel.default)
@rounds_once
def prelu(importer, node, x, weight):
    """dx = g where x > 0, else g w; dw = g x where x <= 0, else 0, also for an infinite x or g"""
    (zero,) = _constants(importer, x, 0)
    positive = importer.emit(op.greater(x, zero))
    below = importer.emit(op.where(positive, zero, x))
    return where(importer, positive, x, op.multiply(weight, below))


@converts(aten.hardswish.default)
@rounds_once
def hardswish(importer, node, x):
    """dx = 0 where x <= -3, g (x / 3 + 1/2) where x < 3, else g"""
    low, zero, half, one, three, six = _constants(importer, x, -3, 0, 0.5, 1, 3, 6)
    ramp = importer.emit(op.minimum(importer.emit(op.maximum(importer.emit(op.add(x, three)), zero)), six))
    value = importer.emit(op.divide(importer.emit(op.multiply(x, ramp)), six))
    middle = op.add(importer.emit(op.divide(x, three)), half)
    inside = importer.emit(op.less(importer.emit(op.abs(x)), three))
    slope = where(importer, inside, middle, one)
    linear = where(importer, op.less_equal(x, low), op.grad.no_grad(x), times(importer, x, slope))
    return with_derivative(importer, value, linear)


@converts(aten.elu.default)
@rounds_once
def elu(importer, node, x, alpha=1, scale=1, input_scale=1):
    """dx = g input_scale (alpha scale) exp(input_scale x) where x <= 0, else g scale

    Not the derivative of ``expm1``, its value plus one: that loses all digits where the result nears -alpha.
    """
    (zero,) = _constants(importer, x, 0)
    bent = importer.emit(op.less_equal(x, zero))
    inner = scaled(importer, importer.emit(op.where(bent, x, zero)), input_scale)
    bend = scaled(importer, importer.library("expm1", [inner], importer.out(node)), alpha * scale)
    value = where(importer, bent, bend, scaled(importer, x, scale))
    falling = scaled(importer, scaled(importer, times(importer, x, op.exp(inner)), alpha * scale), input_scale)
    return with_derivative(importer, value, where(importer, bent, falling, scaled(importer, x, scale)))


@converts(aten.celu.default)
@rounds_once
def celu(importer, node, x, alpha=1.0):
    return elu(importer, node, x, alpha, 1, 1 / alpha)


@converts(aten.softplus.default)
@rounds_once
def softplus(importer, node, x, beta=1, limit=20):
    rising = scaled(importer, x, beta)
    bound = importer.constant(limit, dtype(x))
    beyond = importer.emit(op.greater(rising, bound))
    inside = importer.emit(op.where(beyond, bound, rising))
    smooth = importer.library("log1p", [importer.emit(op.exp(inside))], importer.out(node))
    return importer.emit(op.where(beyond, x, scaled(importer, smooth, 1 / beta)))


@converts(aten.silu.default)
def silu(importer, node, x):
    return importer.emit(op.nn.silu(x))


@converts(aten.mish.default)
@rounds_once
def mish(importer, node, x):
    """dx = g (t + x sigmoid(x) (1 - t^2)), t = tanh(softplus(x))"""
    (one,) = _constants(importer, x, 1)
    t = importer.emit(op.tanh(softplus(importer, node, x)))
    rest = importer.emit(op.subtract(one, importer.emit(op.multiply(t, t))))
    gate = importer.emit(op.multiply(x, importer.emit(op.sigmoid(x))))
    slope = op.add(t, importer.emit(op.multiply(gate, rest)))
    return with_slope(importer, importer.emit(op.multiply(x, t)), x, slope)


@converts(aten.log_sigmoid_forward.default)
@rounds_once
def log_sigmoid(importer, node, x):
    fake, buffer = importer.out(node)
    falling = op.exp(importer.emit(op.negative(importer.emit(op.abs(x)))))  # a GPU's buffer is empty
    is_empty = any(type(extent) is int and extent == 0 for extent in buffer.shape)
    kept = importer.filled(buffer, 0) if is_empty else importer.emit(falling)
    return log_sigmoid_of(importer, x, fake), kept


def log_sigmoid_of(importer, x, fake):
    """dx = g (1 - z / (1 + z)) where x < 0, else g z / (1 + z), with z = exp(-|x|)"""
    zero, one = _constants(importer, x, 0, 1)
    falling = importer.emit(op.exp(importer.emit(op.negative(importer.emit(op.abs(x))))))
    tail = importer.library("log1p", [falling], fake)
    y = importer.emit(op.subtract(importer.emit(op.minimum(x, zero)), tail))
    share = importer.emit(op.divide(falling, importer.emit(op.add(one, falling))))
    slope = where(importer, op.less(x, zero), op.subtract(one, share), share)
    return with_slope(importer, y, x, slope)


@converts(aten.glu.default)
@rounds_once
def glu(importer, node, x, dim=-1):
    """da = g s, db = g a (1 - s) s, with s = sigmoid(b) and a, b the halves of x"""
    dim %= len(shape(x))
    half = shape(x)[dim] // 2
    a, b = (importer.slice(x, [dim], [at], [at + half]) for at in (0, half))
    (one,) = _constants(importer, x, 1)
    s = importer.emit(op.sigmoid(b))
    slope = importer.emit(op.multiply(importer.emit(op.subtract(one, s)), s))
    slope = importer.emit(op.multiply(slope, a))
    linear = op.add(times(importer, a, s), times(importer, b, slope))
    return with_derivative(importer, importer.emit(op.multiply(a, s)), importer.emit(linear))
