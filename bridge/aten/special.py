"""Functions with singular points → Relax, with the gradients of torch's backward formulas at these points."""

from __future__ import annotations

import math

import torch
from tvm import relax

from autodiff.ir import dtype, is_float
from bridge.aten.activations import log_sigmoid_of, scaled, times, where, with_derivative, with_slope
from bridge.aten.pointwise import broadcast
from bridge.aten.registry import converts, rounds_once
from bridge.base.torch_internals import aten, schema
from bridge.capture import TensorMetadata

op = relax.op


@converts(aten.logit.default)
def logit(importer, node, x, eps=None):
    """dx = g / (x (1 - x)); outside of the bounds eps and 1 - eps 0; without eps, nan outside of 0 and 1"""
    (x,) = importer.operands(node, x)
    one = importer.constant(1, dtype(x))
    low, high = (importer.constant(bound, dtype(x)) for bound in (float(eps or 0), 1 - float(eps or 0)))
    below, above = importer.emit(op.less(x, low)), importer.emit(op.greater(x, high))
    inside = importer.emit(op.logical_not(importer.emit(op.logical_or(below, above))))  # includes nan
    inner = x
    if eps is not None:
        inner = where(importer, below, low, where(importer, above, high, x))
    ratio = importer.emit(op.divide(inner, importer.emit(op.subtract(one, inner))))
    product = importer.emit(op.multiply(x, importer.emit(op.subtract(one, x))))
    outside = importer.constant(math.nan if eps is None else 1, dtype(x))
    divisor = importer.emit(op.grad.no_grad(importer.emit(op.where(inside, product, outside))))
    linear = importer.emit(op.divide(x, divisor))
    if eps is not None:
        linear = where(importer, inside, linear, op.grad.no_grad(x))
    return with_derivative(importer, importer.emit(op.log(ratio)), linear)


@converts(aten.sinc.default)
@rounds_once
def sinc(importer, node, x):
    """dx = g (pi x cos(pi x) - sin(pi x)) / (pi x^2); 0 where pi x^2 is 0"""
    (x,) = importer.operands(node, x)
    zero, one = importer.constant(0, dtype(x)), importer.constant(1, dtype(x))
    angle = scaled(importer, x, math.pi)
    sine = importer.emit(op.sin(angle))
    value = where(importer, op.equal(x, zero), one, op.divide(sine, angle))
    square = scaled(importer, importer.emit(op.multiply(x, x)), math.pi)
    turn = importer.emit(op.multiply(angle, importer.emit(op.cos(angle))))
    slope = op.divide(importer.emit(op.subtract(turn, sine)), square)
    flat = importer.emit(op.equal(square, zero))
    linear = where(importer, flat, op.grad.no_grad(x), times(importer, x, where(importer, flat, zero, slope)))
    return with_derivative(importer, value, linear)


@converts(aten.nan_to_num.default)
def nan_to_num(importer, node, x, nan=None, posinf=None, neginf=None):
    """dx = g where x is finite, g times zero elsewhere"""
    if not is_float(x):
        return x
    info = torch.finfo(importer.out(node).dtype)
    given = (nan or 0.0, info.max if posinf is None else posinf, info.min if neginf is None else neginf)
    nan, high, low = (importer.constant(number, dtype(x)) for number in given)
    up, down = (importer.constant(number, dtype(x)) for number in (math.inf, -math.inf))
    value = where(importer, op.not_equal(x, x), nan, x)
    value = where(importer, op.equal(x, down), low, value)
    value = where(importer, op.equal(x, up), high, value)
    return with_slope(importer, value, x, op.astype(importer.emit(op.isfinite(x)), dtype(x)))


@converts(aten.lerp.Scalar, aten.lerp.Tensor)
@rounds_once
def lerp(importer, node, start, end, weight):
    """``start + weight (end - start)`` from the nearer end; dstart = g (1 - w), dend = g w, dw = g (end - start)"""
    start, end, weight = broadcast(importer, node, *importer.operands(node, start, end, weight))
    half, one = (importer.constant(number, dtype(start)) for number in (0.5, 1))
    far = importer.emit(op.greater_equal(importer.emit(op.abs(weight)), half))
    span, rest = importer.emit(op.subtract(end, start)), importer.emit(op.subtract(one, weight))
    before = op.add(start, importer.emit(op.multiply(weight, span)))
    after = op.subtract(end, importer.emit(op.multiply(span, rest)))
    linear = op.add(times(importer, start, rest), times(importer, end, weight))
    linear = importer.emit(op.add(importer.emit(linear), times(importer, weight, span)))
    return with_derivative(importer, where(importer, far, after, before), linear)


@converts(aten.addcmul.default)
@rounds_once
def addcmul(importer, node, x, a, b, *, value=1):
    """``x + value a b``; dx = g, da = g (b value), db = g (a value)"""
    x, a, b = broadcast(importer, node, *importer.operands(node, x, a, b))
    result = importer.emit(op.add(x, importer.emit(op.multiply(scaled(importer, a, value), b))))
    if not is_float(x):
        return result
    linear = op.add(x, times(importer, a, scaled(importer, b, value)))
    linear = importer.emit(op.add(importer.emit(linear), times(importer, b, scaled(importer, a, value))))
    return with_derivative(importer, result, linear)


@converts(aten.addcdiv.default)
@rounds_once
def addcdiv(importer, node, x, a, b, *, value=1):
    """``x + value a / b``; dx = g, da = g (value / b), db = -g (value a / (b b))"""
    x, a, b = broadcast(importer, node, *importer.operands(node, x, a, b))
    over = scaled(importer, a, value)
    result = importer.emit(op.add(x, importer.emit(op.divide(over, b))))
    falling = importer.emit(op.negative(importer.emit(op.divide(over, importer.emit(op.multiply(b, b))))))
    linear = op.add(x, times(importer, a, op.divide(importer.constant(value, dtype(x)), b)))
    linear = importer.emit(op.add(importer.emit(linear), times(importer, b, falling)))
    return with_derivative(importer, result, linear)


@converts(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(importer, node, x, target, weight=None, pos_weight=None, reduction=1):
    """dx = g (s - t) with s = sigmoid(x), dt = -g x; with p = pos_weight g ((p t + 1 - t) s - p t)

    The loss has the target's type, whatever the type of ``x``: torch writes it in place of ``1 - target``.
    """
    fake, of_target = node.args[0].meta["val"], dtype(target)
    wide = torch.promote_types(fake.dtype, getattr(torch, of_target))
    fake, x = TensorMetadata(fake.shape, wide), importer.cast(x, str(wide).removeprefix("torch."))
    target, weight, pos_weight = (
        None if each is None else importer.expand(importer.cast(each, dtype(x)), fake.shape)
        for each in (target, weight, pos_weight)
    )
    one = importer.constant(1, dtype(x))
    falling = _log_sigmoid(importer, x, fake)
    rest = importer.emit(op.subtract(one, target))
    sigmoid = importer.emit(op.sigmoid(x))
    if pos_weight is None:
        kept, slope = falling, op.subtract(sigmoid, target)
        towards = op.negative(x)
    else:
        positive = importer.emit(op.multiply(pos_weight, target))
        share = importer.emit(op.subtract(importer.emit(op.add(positive, one)), target))
        kept = importer.emit(op.multiply(share, falling))
        slope = op.subtract(importer.emit(op.multiply(share, sigmoid)), positive)
        rising = _log_sigmoid(importer, importer.emit(op.negative(x)), fake)
        towards = op.subtract(rising, importer.emit(op.multiply(pos_weight, falling)))
    loss = importer.emit(op.subtract(importer.emit(op.multiply(rest, x)), kept))
    linear = importer.emit(op.add(times(importer, x, slope), times(importer, target, towards)))
    loss = with_derivative(importer, loss, linear)
    if weight is not None:
        loss = importer.emit(op.multiply(loss, weight))
    loss = importer.cast(loss, of_target)
    return loss if reduction == 0 else importer.emit((op.mean if reduction == 1 else op.sum)(loss))


def _log_sigmoid(importer, x, fake):
    """Rounded once for half types, as torch's kernel does."""
    if fake.dtype not in (torch.float16, torch.bfloat16):
        return log_sigmoid_of(importer, x, fake)
    wide = TensorMetadata(fake.shape, torch.float32)
    return importer.cast(log_sigmoid_of(importer, importer.cast(x, "float32"), wide), dtype(x))


@converts(aten.binary_cross_entropy.default)
def binary_cross_entropy(importer, node, x, target, weight=None, reduction=1):
    """Element-wise by the library, whose gradient is bounded where the logarithm's is not."""
    fake = node.args[0].meta["val"]
    loss = importer.library("binary_cross_entropy", [x, target], fake)
    if weight is not None:
        loss = importer.emit(op.multiply(loss, importer.expand(weight, fake.shape)))
    if reduction == 0:
        return loss
    return importer.emit((op.mean if reduction == 1 else op.sum)(loss))


@converts(aten.log1p.default, aten.expm1.default, aten.erfc.default, aten.exp2.default)
def accurate(importer, node, x):
    """Library functions, where the textbook formula loses digits."""
    (x,) = importer.operands(node, x)
    return importer.library(schema(node.target).name.removeprefix("aten::"), [x], importer.out(node))


@converts(aten.log2.default, aten.log10.default)
@rounds_once
def log_base(importer, node, x):
    """dx = g / (x log(base))"""
    (x,) = importer.operands(node, x)
    base = math.log(2 if node.target is aten.log2.default else 10)
    slope = importer.emit(op.grad.no_grad(scaled(importer, x, base)))
    return with_derivative(importer, scaled(importer, importer.emit(op.log(x)), 1 / base), op.divide(x, slope))


@converts(aten.atan2.default)
def atan2(importer, node, y, x):
    return importer.library("atan2", broadcast(importer, node, *importer.operands(node, y, x)), importer.out(node))


@converts(aten.fmod.Tensor, aten.fmod.Scalar, aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(importer, node, x, y):
    name = "fmod" if "fmod" in str(node.target) else "remainder"
    x, y = broadcast(importer, node, *importer.operands(node, x, y))
    return importer.library(name, [x, y], importer.out(node))
