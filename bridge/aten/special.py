"""Functions with singular points → Relax forms whose gradients there are those of torch's backward formulas."""

from __future__ import annotations

import math

from tvm import relax

from autodiff.ir import dtype
from bridge.aten.pointwise import broadcast
from bridge.aten.registry import converts, rounds_once
from bridge.base.torch_internals import aten, schema

op = relax.op


def _where(importer, condition, x, y):
    return importer.emit(op.where(importer.emit(condition), x, y))


def _scaled(importer, x, factor):
    return x if factor == 1 else importer.emit(op.multiply(x, importer.constant(factor, dtype(x))))


@converts(aten.hardtanh.default)
def hardtanh(importer, node, x, lower=-1, upper=1):
    """The gradient stops at the bounds themselves; that of a nan does not."""
    low, high = (importer.constant(bound, dtype(x)) for bound in (lower, upper))
    return _where(importer, op.less_equal(x, low), low, _where(importer, op.greater_equal(x, high), high, x))


@converts(aten.threshold.default)
@rounds_once
def threshold(importer, node, x, bound, value):
    below = op.less_equal(x, importer.constant(bound, dtype(x)))
    return _where(importer, below, importer.constant(value, dtype(x)), x)


@converts(aten.leaky_relu.default)
@rounds_once
def leaky_relu(importer, node, x, slope=0.01):
    return _where(importer, op.greater(x, importer.constant(0, dtype(x))), x, _scaled(importer, x, slope))


@converts(aten.hardswish.default)
@rounds_once
def hardswish(importer, node, x):
    zero, three, six = (importer.constant(value, dtype(x)) for value in (0, 3, 6))
    middle = importer.emit(op.less(importer.emit(op.abs(x)), three))
    inside = importer.emit(op.where(middle, x, zero))
    curve = importer.emit(op.multiply(inside, importer.emit(op.add(inside, three))))
    low = op.less_equal(x, importer.constant(-3, dtype(x)))
    beyond = _where(importer, low, _scaled(importer, importer.emit(op.grad.no_grad(x)), 0), x)
    return importer.emit(op.where(middle, importer.emit(op.divide(curve, six)), beyond))


@converts(aten.elu.default)
@rounds_once
def elu(importer, node, x, alpha=1, scale=1, input_scale=1):
    # the exponential only sees what is selected: its overflow would turn the gradient into nan
    negative = importer.emit(op.clip(x, relax.prim_value(float("-inf")), relax.prim_value(0.0)))
    bend = importer.library("expm1", [_scaled(importer, negative, input_scale)], importer.out(node))
    bent = op.less_equal(x, importer.constant(0, dtype(x)))
    return _where(importer, bent, _scaled(importer, bend, alpha * scale), _scaled(importer, x, scale))


@converts(aten.celu.default)
@rounds_once
def celu(importer, node, x, alpha=1.0):
    return elu(importer, node, x, alpha, 1, 1 / alpha)


@converts(aten.softplus.default)
@rounds_once
def softplus(importer, node, x, beta=1, limit=20):
    scaled = _scaled(importer, x, beta)
    bound = importer.constant(limit, dtype(x))
    beyond = importer.emit(op.greater(scaled, bound))
    inside = importer.emit(op.where(beyond, bound, scaled))
    smooth = importer.library("log1p", [importer.emit(op.exp(inside))], importer.out(node))
    return importer.emit(op.where(beyond, x, _scaled(importer, smooth, 1 / beta)))


@converts(aten.log_sigmoid_forward.default)
@rounds_once
def log_sigmoid(importer, node, x):
    falling = importer.emit(op.exp(importer.emit(op.negative(importer.emit(op.abs(x))))))
    tail = importer.library("log1p", [falling], importer.out(node)[0])
    y = importer.emit(op.subtract(importer.emit(op.minimum(x, importer.constant(0, dtype(x)))), tail))
    return y, importer.filled(importer.out(node)[1], 0)


@converts(aten.logit.default)
def logit(importer, node, x, eps=None):
    (x,) = importer.operands(node, x)
    if eps is not None:
        low, high = (importer.constant(bound, dtype(x)) for bound in (float(eps), 1 - float(eps)))
        x = _where(importer, op.less(x, low), low, _where(importer, op.greater(x, high), high, x))
    rest = importer.emit(op.subtract(importer.constant(1, dtype(x)), x))
    return importer.emit(op.log(importer.emit(op.divide(x, rest))))


@converts(aten.sinc.default)
@rounds_once
def sinc(importer, node, x):
    (x,) = importer.operands(node, x)
    zero, one = importer.constant(0, dtype(x)), importer.constant(1, dtype(x))
    at_zero = importer.emit(op.equal(x, zero))
    angle = _scaled(importer, importer.emit(op.where(at_zero, one, x)), math.pi)
    return importer.emit(op.where(at_zero, one, importer.emit(op.divide(importer.emit(op.sin(angle)), angle))))


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
    return importer.library(schema(node.target).name.removeprefix("aten::"), [x], importer.out(node))


@converts(aten.log2.default, aten.log10.default)
@rounds_once
def log_base(importer, node, x):
    (x,) = importer.operands(node, x)
    base = 2 if node.target is aten.log2.default else 10
    return _scaled(importer, importer.emit(op.log(x)), 1 / math.log(base))


@converts(aten.exp2.default)
@rounds_once
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
    return importer.library(name, [x, y], importer.out(node))
