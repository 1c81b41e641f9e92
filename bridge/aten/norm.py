"""Batch, group and weight normalization → plain arithmetic, with training's statistics and buffer updates."""

from __future__ import annotations

import math

import torch
from tvm import relax

from autodiff.extents import maximum
from autodiff.ir import dtype, numel, shape
from bridge.aten.conv import lies_behind, read_from_behind
from bridge.aten.reductions import euclidean_norm
from bridge.aten.registry import UnsupportedUse, converts, rounds_once
from bridge.base.torch_internals import aten

op = relax.op


def moments(importer, x, axes):
    """Mean and biased variance over ``axes`` (kept as extents of 1), the variance from centred values."""
    mean = importer.emit(op.mean(x, axis=axes, keepdims=True))
    centred = importer.emit(op.subtract(x, mean))
    variance = importer.emit(op.mean(importer.emit(op.multiply(centred, centred)), axis=axes, keepdims=True))
    return mean, centred, variance


def rstd_of(importer, variance, eps):
    return importer.emit(op.rsqrt(importer.emit(op.add(variance, importer.constant(eps, dtype(variance))))))


def affine(importer, x, weight, bias, target):
    """``x * weight + bias`` with both reshaped to ``target``; either may be ``None``."""
    if weight is not None:
        x = importer.emit(op.multiply(x, importer.reshape(weight, target)))
    return x if bias is None else importer.emit(op.add(x, importer.reshape(bias, target)))


@converts(aten._fused_rms_norm.default)
@rounds_once
def fused_rms_norm(importer, node, x, normalized_shape, weight=None, eps=None):
    """A GPU's ``x / sqrt(mean(x^2) + eps) * weight`` and its root; eps by default that of the type it computes in."""
    axes = list(range(len(shape(x)) - len(normalized_shape), len(shape(x))))
    square = importer.emit(op.mean(importer.emit(op.multiply(x, x)), axis=axes, keepdims=True))
    eps = torch.finfo(getattr(torch, dtype(x))).eps if eps is None else eps
    rstd = rstd_of(importer, square, eps)
    return affine(importer, importer.emit(op.multiply(x, rstd)), weight, None, tuple(normalized_shape)), rstd


def _widen(importer, *tensors):
    """Half types as float32, as torch's kernels compute; ``None`` stays."""
    half = ("float16", "bfloat16")
    return [importer.cast(each, "float32") if each is not None and dtype(each) in half else each for each in tensors]


@converts(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
def batch_norm_training(importer, node, x, weight, bias, *rest):
    """Batch statistics; the running ones move towards them, the variance as the unbiased estimate."""
    *running, training, momentum, eps = rest
    element_type = dtype(x)
    x = read_from_behind(importer, x) if lies_behind(node.args[0]) else x
    x, weight, bias = _widen(importer, x, weight, bias)
    if not training:
        raise UnsupportedUse("batch normalization with running statistics in its training form")
    channels = shape(x)[1]
    per_channel = (1, channels, *[1] * (len(shape(x)) - 2))
    axes = [axis for axis in range(len(shape(x))) if axis != 1]
    count = numel(x) // maximum(channels, 1)
    mean, centred, variance = moments(importer, x, axes)
    rstd = rstd_of(importer, variance, eps)
    y = affine(importer, importer.emit(op.multiply(centred, rstd)), weight, bias, per_channel)
    y = importer.cast(y, element_type)
    saved = [importer.reshape(statistic, (channels,)) for statistic in (mean, rstd)]
    if not running:
        return y, *saved
    if count < 2:
        raise UnsupportedUse("batch normalization over one value per channel")
    unbiased = importer.emit(op.multiply(variance, importer.ratio(count, count - 1, dtype(x))))
    moved = [
        _moved(importer, old, importer.reshape(new, (channels,)), momentum)
        for old, new in zip(running, (mean, unbiased), strict=True)
    ]
    return y, *saved, *moved


def _moved(importer, running, batch, momentum):
    """``(1 - momentum) * running + momentum * batch``; the momentum may be a computed number."""
    stored = dtype(running)
    (running,) = _widen(importer, running)
    element_type = dtype(running)
    batch = importer.cast(importer.emit(op.grad.no_grad(batch)), element_type)
    if isinstance(momentum, int | float):
        share, rest = (importer.constant(value, element_type) for value in (momentum, 1 - momentum))
    else:
        share = importer.cast(momentum, element_type)
        rest = importer.emit(op.subtract(importer.constant(1, element_type), share))
    kept = importer.emit(op.multiply(running, rest))
    return importer.cast(importer.emit(op.add(kept, importer.emit(op.multiply(batch, share)))), stored)


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(importer, node, x, weight, bias, running_mean, running_var, momentum, eps):
    element_type = dtype(x)
    x, weight, bias, running_mean, running_var = _widen(importer, x, weight, bias, running_mean, running_var)
    per_channel = (1, shape(x)[1], *[1] * (len(shape(x)) - 2))
    centred = importer.emit(op.subtract(x, importer.reshape(running_mean, per_channel)))
    rstd = importer.reshape(rstd_of(importer, running_var, eps), per_channel)
    y = affine(importer, importer.emit(op.multiply(centred, rstd)), weight, bias, per_channel)
    # nothing is saved, on the processor: a GPU's results have another form, and are refused
    saved = [importer.emit(op.zeros((0,), dtype(running_mean))) for _ in range(2)]
    return importer.cast(y, element_type), *saved


@converts(aten.native_group_norm.default)
def native_group_norm(importer, node, x, weight, bias, batch, channels, pixels, groups, eps):
    element_type = dtype(x)
    behind = lies_behind(node.args[0])
    x, weight, bias = _widen(importer, read_from_behind(importer, x) if behind else x, weight, bias)
    if behind:  # no view of it has the elements of a group in a row
        rows = importer.reshape(x, (batch, groups, shape(x)[1] // groups, *shape(x)[2:]))
        mean, centred, variance = moments(importer, rows, [2, 3, 4])
    else:
        rows = importer.reshape(x, (batch * groups, math.prod(shape(x)) // maximum(batch * groups, 1)))
        mean, centred, variance = moments(importer, rows, [1])
    rstd = rstd_of(importer, variance, eps)
    y = importer.reshape(importer.emit(op.multiply(centred, rstd)), shape(x))
    y = affine(importer, y, weight, bias, (1, channels, *[1] * (len(shape(x)) - 2)))
    y = importer.cast(y, element_type)
    return y, importer.reshape(mean, (batch, groups)), importer.reshape(rstd, (batch, groups))


@converts(aten._weight_norm_interface.default)
@rounds_once
def weight_norm(importer, node, v, g, dim=0):
    """``v`` with the norms ``g`` along all axes but ``dim``, and the norms that it has."""
    norm = euclidean_norm(importer, v, [axis for axis in range(len(shape(v))) if axis != dim], True)
    return importer.emit(op.multiply(v, importer.emit(op.divide(g, norm)))), norm
