"""Arithmetic → Relax: sums, differences, products and quotients, with numbers rounded as torch's kernels round them.

Kernels of half types compute in float32, and take some numbers as they are, others as the half type holds them. Which,
differs between devices: on a GPU a number beside a tensor in a sum, and ``alpha``, are not rounded first; tensors that
lie there are, 0-d ones too. Measured bit by bit on every number that the types hold.
"""

from __future__ import annotations

import torch
from torch import fx
from tvm import relax

from autodiff.extents import Extent
from autodiff.ir import Expr, dtype
from bridge.aten.pointwise import broadcast
from bridge.aten.registry import UnsupportedUse, converts
from bridge.base.devices import HOST, current_device
from bridge.base.torch_internals import aten
from bridge.capture import TensorForm

op = relax.op

_HALF_TYPES = (torch.float16, torch.bfloat16)


def _in_float32_if(condition, importer, convert, node, *args, **kwargs):
    """The conversion, rounded once where a half type does not hold what torch's own kernel computes with."""
    if condition:
        return importer.in_float32(convert, node, args, kwargs)
    return convert(importer, node, *args, **kwargs)


def _rounded(importer, node, number):
    """A number as the result's type holds it."""
    if isinstance(number, Extent | Expr):
        if importer.out(node).dtype in _HALF_TYPES:
            raise UnsupportedUse("a factor of a half type that is made of sizes which vary", "multiply by it")
        return number
    return torch.tensor(number, dtype=importer.out(node).dtype).item()


def _is_wider(importer, node, factor, place):
    """Whether a half type does not hold a factor: torch's kernels take a second one in float32, be it a 0-d tensor of
    the CPU. One of a GPU is cast to the result's type when it is loaded."""
    if importer.out(node).dtype not in _HALF_TYPES or _is_on_gpu(node.args[place]):
        return False
    if isinstance(factor, Expr | Extent):
        return isinstance(factor, Extent) or dtype(factor) in ("float32", "float64")
    return _rounded(importer, node, factor) != factor


def _is_of_gpu():
    return current_device() != HOST


def _is_on_gpu(argument):
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if isinstance(value, TensorForm):  # where sizes vary, a number of the host is taken for one of the device
        return _is_of_gpu()
    return isinstance(value, torch.Tensor) and value.device.type != HOST.type


@converts(aten.add.Tensor, aten.add.Scalar)
def add(importer, node, x, y, *, alpha=1):
    return _linear(_add, importer, node, (x, y), (0, 1), alpha)


def _linear(convert, importer, node, operands, places, alpha):
    """A sum or difference: a GPU's kernel of a half type takes ``alpha`` and numbers in float32, one of the CPU in its
    own type. ``places``: of the operands among the node's arguments."""
    is_half, gpu = importer.out(node).dtype in _HALF_TYPES, _is_of_gpu()
    if not (is_half and gpu) or isinstance(alpha, Extent | Expr):
        alpha = _rounded(importer, node, alpha)
    given = list(zip(operands, places, strict=True))
    wide = not _is_one(alpha) or (gpu and any(_is_wider(importer, node, each, place) for each, place in given))
    if wide and is_half:
        held = [not gpu or _is_on_gpu(node.args[place]) for place in places]
        operands = [importer.operands(node, x)[0] if is_held else x for x, is_held in zip(operands, held, strict=True)]
    return _in_float32_if(wide, importer, convert, node, *operands, alpha=alpha)


def _add(importer, node, x, y, *, alpha):
    x, y = importer.operands(node, x, y)
    if dtype(x) == "bool":
        return importer.emit(op.logical_or(x, y))
    return importer.emit(op.add(x, _scaled(importer, y, alpha)))


@converts(aten.sub.Tensor, aten.sub.Scalar)
def sub(importer, node, x, y, *, alpha=1):
    return _linear(_sub, importer, node, (x, y), (0, 1), alpha)


def _sub(importer, node, x, y, *, alpha):
    x, y = importer.operands(node, x, y)
    return importer.emit(op.subtract(x, _scaled(importer, y, alpha)))


@converts(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(importer, node, x, y, alpha=1):
    return _linear(_sub, importer, node, (y, x), (1, 0), alpha)


def _is_one(factor):
    """For all sizes; asking guards nothing."""
    return not isinstance(factor, Extent | Expr) and factor == 1


def _scaled(importer, value, alpha):
    return value if _is_one(alpha) else importer.emit(op.multiply(value, importer.constant(alpha, dtype(value))))


@converts(aten.mul.Tensor, aten.mul.Scalar)
def mul(importer, node, x, y):
    wide = _is_wider(importer, node, y, 1)
    if _is_wider(importer, node, x, 0):
        if _is_of_gpu():  # whose kernel takes either number in float32
            wide = True
        else:
            (x,) = importer.operands(node, x)
    return _in_float32_if(wide, importer, _mul, node, x, y)


def _mul(importer, node, x, y):
    x, y = importer.operands(node, x, y)
    return importer.emit((op.logical_and if dtype(x) == "bool" else op.multiply)(x, y))


@converts(aten.div.Tensor, aten.div.Scalar)
def div(importer, node, x, y):
    if _is_wider(importer, node, x, 0):
        (x,) = importer.operands(node, x)
    return _in_float32_if(_is_wider(importer, node, y, 1), importer, _div, node, x, y)


def _div(importer, node, x, y):
    x, y = importer.operands(node, x, y)
    return importer.emit(op.divide(x, y))


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(importer, node, x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return div(importer, node, x, y)
    return _in_float32_if(_is_wider(importer, node, y, 1), importer, _div_mode, node, x, y, rounding_mode=rounding_mode)


def _div_mode(importer, node, x, y, *, rounding_mode):
    x, y = importer.operands(node, x, y)
    name = {"trunc": "divide_trunc", "floor": "divide_floor"}[rounding_mode]
    return importer.library(name, broadcast(importer, node, x, y), importer.out(node))
