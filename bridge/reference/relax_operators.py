"""Reference semantics: each Relax operator in torch, as the reference of compiled code and passes.

Each entry is a function ``(call, shape, *arguments)``: ``shape`` is the result's declared shape; arguments are
tensors, numbers, strings, lists of integers (shapes) and tuples. It follows the operator's definition and shares
nothing with the code generator. Autograd runs through it where torch knows the derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autodiff.ir import Call
from bridge.base.devices import current_device
from bridge.reference.custom_functions import with_own_gradient

__all__ = ["LIBRARY", "OPERATORS"]

Meaning = Callable[..., Any]

OPERATORS: dict[str, Meaning] = {}
#: Library functions for which compiled programs contain generated code instead of a call.
LIBRARY: dict[str, Meaning] = {
    "library.log1p": torch.log1p,
    "library.expm1": torch.expm1,
    "library.matmul_bias": lambda x, matrix, bias, extents: F.linear(x, matrix.t(), bias).view(extents),
    "library.with_derivative": with_own_gradient,
    "library.overwritten": lambda x, parameter, last: x,
}


def _means(*names: str) -> Callable[[Meaning], Meaning]:
    def add(function: Meaning) -> Meaning:
        for name in names:
            OPERATORS[f"relax.{name}"] = function
        return function

    return add


def _elementwise() -> None:
    same = "exp log sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf sigmoid".split()
    same += "abs sign floor ceil round trunc isnan isinf isfinite square logical_not bitwise_not".split()
    for name, function in {name: getattr(torch, name) for name in same}.items():
        _means(name)(lambda call, shape, x, f=function: f(x))
    _means("negative")(lambda call, shape, x: -x)
    _means("nn.relu")(lambda call, shape, x: torch.relu(x))
    _means("nn.silu")(lambda call, shape, x: F.silu(x))
    _means("nn.gelu")(lambda call, shape, x: F.gelu(x))
    _means("nn.gelu_tanh")(lambda call, shape, x: F.gelu(x, approximate="tanh"))
    pairs = {
        "add": torch.add,
        "subtract": torch.sub,
        "multiply": torch.mul,
        "power": torch.pow,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "equal": torch.eq,
        "not_equal": torch.ne,
        "less": torch.lt,
        "less_equal": torch.le,
        "greater": torch.gt,
        "greater_equal": torch.ge,
        "logical_and": torch.logical_and,
        "logical_or": torch.logical_or,
        "logical_xor": torch.logical_xor,
        "bitwise_and": torch.bitwise_and,
        "bitwise_or": torch.bitwise_or,
        "bitwise_xor": torch.bitwise_xor,
    }
    for name, function in pairs.items():
        _means(name)(lambda call, shape, a, b, f=function: f(a, b))


_elementwise()


@_means("divide")
def divide(call: Call, shape: Sequence[int], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = not (a.is_floating_point() or b.is_floating_point())
    return torch.div(a, b, rounding_mode="trunc" if whole else None)


@_means("where")
def where(call: Call, shape: Sequence[int], condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(condition.bool(), a, b)


@_means("clip")
def clip(call: Call, shape: Sequence[int], x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.clamp(x, low, high)


@_means("astype", "wrap_param")
def astype(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return x.to(getattr(torch, str(call.ty.dtype)))


@_means("grad.no_grad")
def no_grad(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return x.detach()


def _axes(call: Call, x: torch.Tensor) -> list[int]:
    axis = call.attrs.axis
    return list(range(x.dim())) if axis is None else [int(each) % x.dim() for each in axis]


def _reduction(function: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> Meaning:
    def meaning(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        axes = _axes(call, x)
        return (function(x, axes) if axes else x).reshape(shape)

    return meaning


def _product(x: torch.Tensor, axes: list[int]) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis)
    return x


_means("sum")(_reduction(lambda x, axes: torch.sum(x, axes)))
_means("mean")(_reduction(lambda x, axes: torch.mean(x, axes)))
_means("prod")(_reduction(_product))
_means("max")(_reduction(lambda x, axes: torch.amax(x, axes)))
_means("min")(_reduction(lambda x, axes: torch.amin(x, axes)))


@_means("cumsum")
def cumsum(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    x, dim = (x.reshape(-1), 0) if call.attrs.axis is None else (x, int(call.attrs.axis))
    if call.attrs.exclusive:
        first = torch.zeros_like(x.narrow(dim, 0, min(1, x.shape[dim])))
        x = torch.cat([first, x.narrow(dim, 0, max(x.shape[dim] - 1, 0))], dim)
    return torch.cumsum(x, dim)


@_means("matmul")
def matmul(call: Call, shape: Sequence[int], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kind = getattr(torch, str(call.ty.dtype))
    return torch.matmul(a.to(kind), b.to(kind))


@_means("nn.softmax")
def softmax(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, int(call.attrs.axis))


@_means("nn.log_softmax")
def log_softmax(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, int(call.attrs.axis))


@_means("nn.layer_norm")
def layer_norm(call: Call, shape: Sequence[int], x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    axes = [int(axis) % x.dim() for axis in call.attrs.axes]
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + float(call.attrs.epsilon))
    y = y * weight if call.attrs.scale else y
    return y + bias if call.attrs.center else y


@_means("reshape", "expand_dims", "squeeze", "flatten", "nn.batch_flatten")
def reshape(call: Call, shape: Sequence[int], x: torch.Tensor, *target: Any) -> torch.Tensor:
    return x.reshape(shape)


@_means("broadcast_to")
def broadcast_to(call: Call, shape: Sequence[int], x: torch.Tensor, target: Any) -> torch.Tensor:
    return x.expand(shape)


@_means("permute_dims")
def permute_dims(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    axes = call.attrs.axes
    return x.permute(list(range(x.dim()))[::-1] if axes is None else [int(axis) for axis in axes])


@_means("strided_slice")
def strided_slice(
    call: Call, shape: Sequence[int], x: torch.Tensor, axes: tuple, begin: tuple, end: tuple, strides: tuple = ()
) -> torch.Tensor:
    steps = strides or (1,) * len(axes)
    if any(step <= 0 for step in steps):
        raise NotImplementedError("strided_slice with a step that is not positive")
    index = [slice(None)] * x.dim()
    for axis, first, last, step in zip(axes, begin, end, steps, strict=True):
        index[axis] = slice(first, last, step)
    return x[tuple(index)]


@_means("concat")
def concat(call: Call, shape: Sequence[int], parts: tuple) -> torch.Tensor:
    axis = call.attrs.axis
    return torch.cat([part.reshape(-1) for part in parts] if axis is None else parts, int(axis or 0))


@_means("stack")
def stack(call: Call, shape: Sequence[int], parts: tuple) -> torch.Tensor:
    return torch.stack(parts, int(call.attrs.axis or 0))


@_means("split")
def split(call: Call, shape: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    axis = int(call.attrs.axis)
    return torch.split(x, [int(field.shape[axis]) for field in call.ty.fields], axis)


@_means("flip")
def flip(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.flip(x, [int(call.attrs.axis)])


@_means("gather_elements")
def gather_elements(call: Call, shape: Sequence[int], x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.gather(x, int(call.attrs.axis), index.long())


@_means("scatter_elements")
def scatter_elements(
    call: Call, shape: Sequence[int], x: torch.Tensor, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    how, axis = str(call.attrs.reduction), int(call.attrs.axis)
    if how == "update":
        return torch.scatter(x, axis, index.long(), source)
    if how == "add":
        return torch.scatter_add(x, axis, index.long(), source)
    raise NotImplementedError(f"scatter_elements with reduction {how}")


def _filled(call: Call, shape: Sequence[int], number: Any) -> torch.Tensor:
    return torch.full(shape, number, dtype=getattr(torch, str(call.ty.dtype)), device=current_device())


_means("zeros", "zeros_like")(lambda call, shape, like: _filled(call, shape, 0))
_means("ones", "ones_like")(lambda call, shape, like: _filled(call, shape, 1))
_means("full", "full_like")(lambda call, shape, like, number: _filled(call, shape, number.item()))


@_means("arange")
def arange(call: Call, shape: Sequence[int], start: float, stop: float, step: float) -> torch.Tensor:
    return torch.arange(start, stop, step, dtype=getattr(torch, str(call.ty.dtype)), device=current_device())
