"""Functions that need care at singular points: there the gradient must be the one of torch's backward formula."""

from __future__ import annotations

import math

import torch
from tvm import relax

from autodiff.ir import dtype, is_float
from bridge.aten.pointwise import broadcast
from bridge.aten.registry import Refused, converts

aten = torch.ops.aten
op = relax.op


def _where(importer, condition, x, y):
    return importer.emit(op.where(importer.emit(condition), x, y))


def _scaled(importer, x, factor):
    return x if factor == 1 else importer.emit(op.multiply(x, importer.constant(factor, dtype(x))))


@converts(aten.hardtanh.default)
def hardtanh(importer, node, x, lower=-1, upper=1):
    """The gradient stops at the bounds themselves, unlike clamp's."""
    low, high = (importer.constant(bound, dtype(x)) for bound in (lower, upper))
    return _where(importer, op.less_equal(x, low), low, _where(importer, op.greater_equal(x, high), high, x))


@converts(aten.hardsigmoid.default)
def hardsigmoid(importer, node, x):
    zero, one, three = (importer.constant(value, dtype(x)) for value in (0, 1, 3))
    line = importer.emit(op.divide(importer.emit(op.add(x, three)), importer.constant(6, dtype(x))))
    below = op.less_equal(x, importer.constant(-3, dtype(x)))
    return _where(importer, below, zero, _where(importer, op.greater_equal(x, three), one, line))


@converts(aten.threshold.default)
def threshold(importer, node, x, bound, value):
    below = op.less_equal(x, importer.constant(bound, dtype(x)))
    return _where(importer, below, importer.constant(value, dtype(x)), x)


@converts(aten.leaky_relu.default)
def leaky_relu(importer, node, x, slope=0.01):
    return _where(importer, op.greater(x, importer.constant(0, dtype(x))), x, _scaled(importer, x, slope))


@converts(aten.elu.default)
def elu(importer, node, x, alpha=1, scale=1, input_scale=1):
    # the exponential only sees what is selected: its overflow would turn the gradient into nan
    negative = importer.emit(op.clip(x, relax.prim_value(float("-inf")), relax.prim_value(0.0)))
    bend = importer.library("expm1", [_scaled(importer, negative, input_scale)], importer.out(node))
    positive = op.greater(x, importer.constant(0, dtype(x)))
    return _where(importer, positive, _scaled(importer, x, scale), _scaled(importer, bend, alpha * scale))


@converts(aten.softplus.default)
def softplus(importer, node, x, beta=1, limit=20):
    scaled = _scaled(importer, x, beta)
    bound = importer.constant(limit, dtype(x))
    inside = importer.emit(op.clip(scaled, relax.prim_value(float("-inf")), relax.prim_value(float(limit))))
    smooth = importer.library("log1p", [importer.emit(op.exp(inside))], importer.out(node))
    return _where(importer, op.greater(scaled, bound), x, _scaled(importer, smooth, 1 / beta))


@converts(aten.log_sigmoid_forward.default)
def log_sigmoid(importer, node, x):
    falling = importer.emit(op.exp(importer.emit(op.negative(importer.emit(op.abs(x))))))
    tail = importer.library("log1p", [falling], node.meta["val"][0])
    y = importer.emit(op.subtract(importer.emit(op.minimum(x, importer.constant(0, dtype(x)))), tail))
    return y, importer.filled(node.meta["val"][1], 0)


@converts(aten.logit.default)
def logit(importer, node, x, eps=None):
    (x,) = importer.operands(node, x)
    if eps is not None:
        x = importer.emit(op.clip(x, relax.prim_value(float(eps)), relax.prim_value(1 - float(eps))))
    rest = importer.emit(op.subtract(importer.constant(1, dtype(x)), x))
    return importer.emit(op.log(importer.emit(op.divide(x, rest))))


@converts(aten.sinc.default)
def sinc(importer, node, x):
    (x,) = importer.operands(node, x)
    zero, one = importer.constant(0, dtype(x)), importer.constant(1, dtype(x))
    at_zero = importer.emit(op.equal(x, zero))
    angle = _scaled(importer, importer.emit(op.where(at_zero, one, x)), math.pi)
    return importer.emit(op.where(at_zero, one, importer.emit(op.divide(importer.emit(op.sin(angle)), angle))))


@converts(aten.xlogy.Tensor)
def xlogy(importer, node, x, y):
    x, y = importer.operands(node, x, y)
    zero, one = importer.constant(0, dtype(x)), importer.constant(1, dtype(x))
    empty = importer.emit(op.equal(x, zero))
    hidden = importer.emit(op.logical_and(empty, importer.emit(op.less_equal(y, zero))))
    product = importer.emit(op.multiply(x, importer.emit(op.log(importer.emit(op.where(hidden, one, y))))))
    return importer.emit(op.where(importer.emit(op.not_equal(y, y)), y, product))


@converts(aten.binary_cross_entropy.default)
def binary_cross_entropy(importer, node, x, target, weight=None, reduction=1):
    """Element-wise by the library, whose gradient is bounded where the logarithm is not."""
    fake = node.args[0].meta["val"]
    loss = importer.library("binary_cross_entropy", [x, target], fake)
    if weight is not None:
        loss = importer.emit(op.multiply(loss, importer.expand(weight, fake.shape)))
    if reduction == 0:
        return loss
    return importer.emit((op.mean if reduction == 1 else op.sum)(loss))


@converts(aten.log1p.default, aten.expm1.default, aten.erfc.default)
def accurate(importer, node, x):
    """Functions whose textbook form loses digits: the library's."""
    (x,) = importer.operands(node, x)
    return importer.library(node.target._schema.name.removeprefix("aten::"), [x], importer.out(node))


@converts(aten.log2.default, aten.log10.default)
def log_base(importer, node, x):
    (x,) = importer.operands(node, x)
    base = 2 if node.target is aten.log2.default else 10
    return _scaled(importer, importer.emit(op.log(x)), 1 / math.log(base))


@converts(aten.exp2.default)
def exp2(importer, node, x):
    (x,) = importer.operands(node, x)
    return importer.emit(op.exp(_scaled(importer, x, math.log(2))))


@converts(aten.atan2.default)
def atan2(importer, node, y, x):
    return importer.library("atan2", broadcast(importer, node, *importer.operands(node, y, x)), importer.out(node))


@converts(aten.fmod.Tensor, aten.fmod.Scalar, aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(importer, node, x, y):
    name = "fmod" if "fmod" in str(node.target) else "remainder"
    x, y = broadcast(importer, node, *importer.operands(node, x, y))
    if not is_float(x) and not isinstance(node.args[1], int):
        raise Refused(f"{name} of integers by a tensor", "convert to a floating point type first")
    return importer.library(name, [x, y], importer.out(node))


@converts(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(importer, node, x, y):
    x, y = importer.operands(node, x, y)
    # 1/y tells -0.0 from 0.0
    zero = importer.constant(0, dtype(x))
    inverse = importer.emit(op.divide(importer.constant(1, dtype(x)), importer.emit(op.grad.no_grad(y))))
    negative = op.logical_or(importer.emit(op.less(y, zero)), importer.emit(op.less(inverse, zero)))
    one, minus = importer.constant(1, dtype(x)), importer.constant(-1, dtype(x))
    return importer.emit(op.multiply(importer.emit(op.abs(x)), _where(importer, negative, minus, one)))
