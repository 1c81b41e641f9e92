"""Elementwise operators → Relax: arithmetic, comparisons, selections, casts, activations.

Sums, differences, products and quotients round numbers as torch's kernels do. Kernels of half types compute in float32;
they take some numbers exactly, others rounded to the half type, and devices differ. A GPU does not round a number in a
sum with a tensor, nor ``alpha``, but does round tensors on the GPU, 0-d ones included. Measured bit by bit on every
number of the half types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from autodiff.extents import Extent
from autodiff.ir import Expr, dtype, is_float
from bridge.aten.activations import clamp_at_bound, fmax_prefers_first, with_slope
from bridge.aten.any_operator import whole
from bridge.aten.registry import UnsupportedUse, converts, has_extents
from bridge.base.devices import HOST, current_device
from bridge.base.quirks import quirk
from bridge.base.torch_internals import aten
from bridge.capture import RAN, STOP_GRADIENT, TensorMetadata

op = relax.op


def _alike(names: str) -> dict[Any, Callable[..., Expr]]:
    """Overloads of operators that have the same name in Relax."""
    return {getattr(aten, name).default: getattr(op, name) for name in names.split()}


_UNARY = {
    **_alike("sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp log sqrt rsqrt erf sigmoid abs sign"),
    aten.neg.default: op.negative,
    aten.relu.default: op.nn.relu,
}
_COMPARISONS = {
    **{aten.eq: op.equal, aten.ne: op.not_equal, aten.lt: op.less},
    **{aten.le: op.less_equal, aten.gt: op.greater, aten.ge: op.greater_equal},
}
_BITWISE = {
    aten.bitwise_and: (op.bitwise_and, op.logical_and),
    aten.bitwise_or: (op.bitwise_or, op.logical_or),
    aten.bitwise_xor: (op.bitwise_xor, op.logical_xor),
}


def _register_tables() -> None:
    for overload, make in _UNARY.items():

        @converts(overload)
        def convert(importer, node, x, *, make=make):
            (x,) = importer.operands(node, x)
            if dtype(x) == "bool":  # absolute value and sign of a bool
                return x
            return importer.emit(make(x))

    for overload, make in _alike("floor ceil round trunc").items():

        @converts(overload)
        def rounding(importer, node, x, *, make=make):
            return importer.emit(make(x)) if is_float(x) else x

    for packet, make in _COMPARISONS.items():

        @converts(packet.Tensor, packet.Scalar)
        def compare(importer, node, x, y, *, make=make):
            x, y = importer.compared(node, x, y)
            if dtype(x) == "bool":  # TVM does not order bools
                x, y = importer.cast(x, "uint8"), importer.cast(y, "uint8")
            return importer.emit(make(x, y))

    for packet, (bitwise, logical) in _BITWISE.items():

        @converts(packet.Tensor, packet.Scalar, packet.Scalar_Tensor)
        def combine(importer, node, x, y, *, bitwise=bitwise, logical=logical):
            x, y = importer.operands(node, x, y)
            return importer.emit((logical if dtype(x) == "bool" else bitwise)(x, y))

    for overload, make in _alike("logical_and logical_or logical_xor").items():

        @converts(overload)
        def logical_op(importer, node, x, y, *, make=make):
            return importer.emit(make(importer.cast(x, "bool"), importer.cast(y, "bool")))


_register_tables()


@converts(aten.logical_not.default)
def logical_not(importer, node, x):
    return importer.emit(op.logical_not(importer.cast(x, "bool")))


@converts(aten.bitwise_not.default)
def bitwise_not(importer, node, x):
    return importer.emit((op.logical_not if dtype(x) == "bool" else op.bitwise_not)(x))


@converts(aten.isnan.default)
def isnan(importer, node, x):
    return importer.emit(op.not_equal(x, x))


@converts(aten.isinf.default)
def isinf(importer, node, x):
    if not is_float(x):
        return importer.filled(importer.out(node), False)
    return importer.emit(op.equal(importer.emit(op.abs(x)), importer.constant(float("inf"), dtype(x))))


def broadcast(importer, node, *operands):
    """``operands`` expanded to the shape of the node's result."""
    return [importer.expand(operand, importer.out(node).shape) for operand in operands]


@converts(aten.reciprocal.default)
def reciprocal(importer, node, x):
    """dx = -g y^2"""
    (x,) = importer.operands(node, x)
    y = importer.emit(op.divide(importer.constant(1, dtype(x)), x))
    return with_slope(importer, y, x, op.negative(importer.emit(op.multiply(y, y))))


@converts(aten.pow.Tensor_Scalar)
def pow_scalar(importer, node, x, exponent):
    (x,) = importer.operands(node, x)
    if isinstance(exponent, Extent | Expr):
        if dtype(x) not in ("float32", "float64"):
            raise UnsupportedUse(
                f"an exponent of {dtype(x)} that is made of sizes which vary", "torch.pow with a tensor"
            )
        return importer.emit(op.power(x, importer.constant(exponent, dtype(x))))
    if exponent == 2:
        return importer.emit(op.multiply(x, x))
    if exponent == 1:
        return x
    if exponent == 0.5 and is_float(x):  # the gradient of a power reads x, the gradient of a root reads the root
        slope = op.multiply(importer.constant(0.5, dtype(x)), importer.emit(op.rsqrt(x)))
        return with_slope(importer, importer.emit(op.sqrt(x)), x, slope)
    if exponent == 3:
        return importer.emit(op.multiply(importer.emit(op.multiply(x, x)), x))
    if not is_float(x):
        return whole(importer, node, x, exponent)
    return importer.emit(op.power(x, importer.constant(exponent, dtype(x))))


@converts(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(importer, node, x, y):
    if not importer.out(node).is_floating_point():
        return whole(importer, node, x, y)
    return importer.emit(op.power(*importer.operands(node, x, y)))


_LARGER, _SMALLER = (op.logical_or, op.maximum), (op.logical_and, op.minimum)
"""The larger and the smaller of two operands: of bools, of numbers."""


@converts(aten.maximum.default, aten.minimum.default)
def extremum(importer, node, x, y):
    of_bools, make = _LARGER if node.target in (aten.maximum.default, aten.fmax.default) else _SMALLER
    x, y = importer.operands(node, x, y)
    return importer.emit((of_bools if dtype(x) == "bool" else make)(x, y))


@converts(aten.fmax.default, aten.fmin.default)
def fmax(importer, node, x, y):
    if not importer.out(node).is_floating_point():
        return extremum(importer, node, x, y)
    if not fmax_prefers_first():
        return whole(importer, node, x, y)
    x, y = importer.operands(node, x, y)
    better = (op.greater_equal if node.target is aten.fmax.default else op.less_equal)(x, y)
    keep = op.logical_or(importer.emit(better), importer.emit(op.not_equal(y, y)))
    return importer.emit(op.where(importer.emit(keep), x, y))


@converts(aten.frac.default)
def frac(importer, node, x):
    return importer.emit(op.subtract(x, importer.emit(op.trunc(x))))


@quirk(
    "torch.clamp",
    reason="a bound that is nan is none",
    test="tests/bridge/aten/test_singular.py::clamp_nan",
    until="2.12",
)
@converts(aten.clamp.default)
def clamp(importer, node, x, lower=None, upper=None):
    at_bound = clamp_at_bound() if is_float(x) else 1.0
    if at_bound is None or any(bound != bound for bound in (lower, upper)):
        return whole(importer, node, x, lower, upper)
    (x,) = importer.operands(node, x)
    if has_extents((lower, upper)) or isinstance(lower, Expr) or isinstance(upper, Expr):
        return _clamp_to_sizes(importer, x, lower, upper)
    low, high = _bounds(dtype(x), lower, upper)
    clipped = importer.emit(op.clip(x, relax.prim_value(low), relax.prim_value(high)))
    if at_bound == 1.0:
        return clipped
    within = [
        importer.emit(compare(x, importer.constant(bound, dtype(x))))
        for compare, bound in ((op.greater, lower), (op.less, upper))
        if bound is not None
    ]
    inside = within[0] if len(within) == 1 else importer.emit(op.logical_and(*within))
    return importer.emit(op.where(inside, x, importer.emit(op.grad.no_grad(clipped))))


def _clamp_to_sizes(importer, x, lower, upper):
    """A clamp whose bounds are sizes, without a gradient, which would have to stop at them."""
    if is_float(x):
        raise UnsupportedUse("a bound that is made of sizes which vary")
    for bound, take in ((lower, op.maximum), (upper, op.minimum)):
        x = x if bound is None else importer.emit(take(x, importer.constant(bound, dtype(x))))
    return x


def _bounds(element_type, lower, upper):
    info = torch.iinfo(getattr(torch, element_type)) if "float" not in element_type else None
    lower = (info.min if info else float("-inf")) if lower is None else lower
    upper = (info.max if info else float("inf")) if upper is None else upper
    return lower, upper


@converts(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(importer, node, condition, x, y):
    x, y = importer.operands(node, x, y)
    return importer.emit(op.where(importer.cast(condition, "bool"), x, y))


@converts(aten._to_copy.default)
def to_copy(importer, node, x, *, dtype=None, device=None, **layout):
    kind = importer.out(node).dtype
    is_number = kind.is_floating_point or kind.is_complex  # integers of the host are computed on the call's device
    homes = current_device().type, node.args[0].meta["val"].device.type  # a number of the host may stay there
    if device is not None and torch.device(device).type not in homes and is_number:
        raise UnsupportedUse(f"a copy to device {device}")
    return importer.cast(x, importer.out_dtype(node))


@converts(aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default, aten.contiguous.default)
def identity(importer, node, x, **layout):
    return x


@converts(STOP_GRADIENT)
def stop_gradient(importer, node, x):
    return importer.emit(op.grad.no_grad(x)) if is_float(x) else x


@converts(RAN)
def ran(importer, node, x):
    return importer.library("ran", [importer.whole_of(x)], node.meta["val"])


@converts(aten.gelu.default)
def gelu(importer, node, x, *, approximate="none"):
    return importer.emit((op.nn.gelu if approximate == "none" else op.nn.gelu_tanh)(x))


@converts(aten.copy.default)
def copy(importer, node, x, source, non_blocking=False):
    return importer.expand(importer.cast(source, importer.out_dtype(node)), importer.out(node).shape)


_HALF_TYPES = (torch.float16, torch.bfloat16)


def _in_float32_if(condition, importer, convert, node, *args, **kwargs):
    """The conversion, in float32 and rounded once if ``condition`` holds."""
    if condition:
        return importer.in_float32(convert, node, args, kwargs)
    return convert(importer, node, *args, **kwargs)


def _rounded(importer, node, number):
    """A number rounded to the result's type."""
    if isinstance(number, Extent | Expr):
        if importer.out(node).dtype in _HALF_TYPES:
            raise UnsupportedUse("a factor of a half type that is made of sizes which vary", "multiply by it")
        return number
    return torch.tensor(number, dtype=importer.out(node).dtype).item()


def _is_wider(importer, node, factor, place):
    """Whether a half type cannot hold a factor: torch's kernels take a second factor in float32, even a 0-d tensor of
    the CPU. A GPU's 0-d tensor is cast to the result's type when it is loaded."""
    if importer.out(node).dtype not in _HALF_TYPES or _is_on_gpu(node.args[place]):
        return False
    if isinstance(factor, Expr | Extent):
        return isinstance(factor, Extent) or dtype(factor) in ("float32", "float64")
    return _rounded(importer, node, factor) != factor


def _is_of_gpu():
    return current_device() != HOST


def _is_on_gpu(argument):
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if isinstance(value, TensorMetadata):  # with dynamic sizes, a number of the host counts as one of the device
        return _is_of_gpu()
    return isinstance(value, torch.Tensor) and value.device.type != HOST.type


@converts(aten.add.Tensor, aten.add.Scalar)
def add(importer, node, x, y, *, alpha=1):
    return _linear(_add, importer, node, (x, y), (0, 1), alpha)


def _linear(convert, importer, node, operands, places, alpha):
    """A sum or difference: a GPU's kernel of a half type takes ``alpha`` and numbers in float32, the CPU's kernel in
    its own type. ``places``: the operands' indices among the node's arguments."""
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
    """Whether a factor is 1 for all sizes; adds no guard."""
    return not isinstance(factor, Extent | Expr) and factor == 1


def _scaled(importer, value, alpha):
    return value if _is_one(alpha) else importer.emit(op.multiply(value, importer.constant(alpha, dtype(value))))


@converts(aten.mul.Tensor, aten.mul.Scalar)
def mul(importer, node, x, y):
    wide = _is_wider(importer, node, y, 1)
    if _is_wider(importer, node, x, 0):
        if _is_of_gpu():  # its kernel takes either number in float32
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
