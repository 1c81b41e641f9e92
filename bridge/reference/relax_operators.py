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

from autodiff.ir import Call, axes_of, dtype, permutation
from bridge.base.devices import current_device
from bridge.reference.custom_functions import with_own_gradient

Meaning = Callable[..., Any]

#: Library functions for which compiled programs contain generated code instead of a call.
LIBRARY: dict[str, Meaning] = {
    "library.log1p": torch.log1p,
    "library.expm1": torch.expm1,
    "library.matmul_bias": lambda x, matrix, bias, extents: F.linear(x, matrix.t(), bias).view(extents),
    "library.with_derivative": with_own_gradient,
    "library.overwritten": lambda x, parameter, last: x,
}

_NAMED_ALIKE = "exp log sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf sigmoid".split()
_NAMED_ALIKE += "abs sign floor ceil round trunc isnan isinf isfinite square logical_not bitwise_not negative".split()
_NAMED_ALIKE += "add subtract multiply maximum minimum not_equal less less_equal greater greater_equal".split()
_NAMED_ALIKE += "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor".split()


def _of_elements(function: Callable[..., torch.Tensor]) -> Meaning:
    return lambda call, shape, *operands: function(*operands)


def _type(call: Call) -> torch.dtype:
    return getattr(torch, dtype(call))


def _axis(call: Call) -> int:
    return int(call.attrs.axis)


def _reduction(function: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> Meaning:
    def meaning(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        axes = axes_of(call)
        return (function(x, axes) if axes else x).reshape(shape)

    return meaning


def _product(x: torch.Tensor, axes: list[int]) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis)
    return x


def _divide(call: Call, shape: Sequence[int], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = not (a.is_floating_point() or b.is_floating_point())
    return torch.div(a, b, rounding_mode="trunc" if whole else None)


def _cumsum(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    x, dim = (x.reshape(-1), 0) if call.attrs.axis is None else (x, _axis(call))
    if call.attrs.exclusive:
        first = torch.zeros_like(x.narrow(dim, 0, min(1, x.shape[dim])))
        x = torch.cat([first, x.narrow(dim, 0, max(x.shape[dim] - 1, 0))], dim)
    return torch.cumsum(x, dim)


def _layer_norm(call: Call, shape: Sequence[int], x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    axes = [int(axis) % x.dim() for axis in call.attrs.axes]
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + float(call.attrs.epsilon))
    y = y * weight if call.attrs.scale else y
    return y + bias if call.attrs.center else y


def _strided_slice(
    call: Call, shape: Sequence[int], x: torch.Tensor, axes: tuple, begin: tuple, end: tuple, strides: tuple = ()
) -> torch.Tensor:
    steps = strides or (1,) * len(axes)
    if any(step <= 0 for step in steps):
        raise NotImplementedError("strided_slice with a step that is not positive")
    index = [slice(None)] * x.dim()
    for axis, first, last, step in zip(axes, begin, end, steps, strict=True):
        index[axis] = slice(first, last, step)
    return x[tuple(index)]


def _pad(call: Call, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    widths = [int(width) for width in call.attrs.pad_width]
    last_first = [width for axis in reversed(range(x.dim())) for width in widths[2 * axis : 2 * axis + 2]]
    return F.pad(x, last_first, str(call.attrs.pad_mode), float(call.attrs.pad_value))


def _concat(call: Call, shape: Sequence[int], parts: tuple) -> torch.Tensor:
    axis = call.attrs.axis
    return torch.cat([part.reshape(-1) for part in parts] if axis is None else parts, int(axis or 0))


def _split(call: Call, shape: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(x, [int(field.shape[_axis(call)]) for field in call.ty.fields], _axis(call))


def _scatter_elements(
    call: Call, shape: Sequence[int], x: torch.Tensor, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    write = {"update": torch.scatter, "add": torch.scatter_add}.get(str(call.attrs.reduction))
    if write is None:
        raise NotImplementedError(f"scatter_elements with reduction {call.attrs.reduction}")
    return write(x, _axis(call), index.long(), source)


def _filled(call: Call, shape: Sequence[int], number: Any) -> torch.Tensor:
    return torch.full(shape, number, dtype=_type(call), device=current_device())


_MEANINGS: dict[str, Meaning] = {
    **{name: _of_elements(getattr(torch, name)) for name in _NAMED_ALIKE},
    "equal": _of_elements(torch.eq),
    "power": _of_elements(torch.pow),
    "divide": _divide,
    "where": lambda call, shape, condition, a, b: torch.where(condition.bool(), a, b),
    "clip": lambda call, shape, x, low, high: torch.clamp(x, low, high),
    **dict.fromkeys(("astype", "wrap_param"), lambda call, shape, x: x.to(_type(call))),
    "grad.no_grad": lambda call, shape, x: x.detach(),
    "nn.pad": _pad,
    "nn.relu": _of_elements(torch.relu),
    "nn.silu": _of_elements(F.silu),
    "nn.gelu": _of_elements(F.gelu),
    "nn.gelu_tanh": lambda call, shape, x: F.gelu(x, approximate="tanh"),
    "nn.softmax": lambda call, shape, x: torch.softmax(x, _axis(call)),
    "nn.log_softmax": lambda call, shape, x: torch.log_softmax(x, _axis(call)),
    "nn.layer_norm": _layer_norm,
    "sum": _reduction(torch.sum),
    "mean": _reduction(torch.mean),
    "prod": _reduction(_product),
    "max": _reduction(torch.amax),
    "min": _reduction(torch.amin),
    "cumsum": _cumsum,
    "matmul": lambda call, shape, a, b: torch.matmul(a.to(_type(call)), b.to(_type(call))),
    **dict.fromkeys(
        ("reshape", "expand_dims", "squeeze", "flatten", "nn.batch_flatten"),
        lambda call, shape, x, *target: x.reshape(shape),
    ),
    "broadcast_to": lambda call, shape, x, target: x.expand(shape),
    "permute_dims": lambda call, shape, x: x.permute(permutation(call)),
    "strided_slice": _strided_slice,
    "concat": _concat,
    "split": _split,
    "flip": lambda call, shape, x: torch.flip(x, [_axis(call)]),
    "gather_elements": lambda call, shape, x, index: torch.gather(x, _axis(call), index.long()),
    "scatter_elements": _scatter_elements,
    **dict.fromkeys(("zeros", "zeros_like"), lambda call, shape, like: _filled(call, shape, 0)),
    **dict.fromkeys(("ones", "ones_like"), lambda call, shape, like: _filled(call, shape, 1)),
    **dict.fromkeys(("full", "full_like"), lambda call, shape, like, number: _filled(call, shape, number.item())),
    "arange": lambda call, shape, *bounds: torch.arange(*bounds, dtype=_type(call), device=current_device()),
}

OPERATORS = {f"relax.{name}": meaning for name, meaning in _MEANINGS.items()}
