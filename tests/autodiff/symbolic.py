"""Functions with symbolic extents for tests: a sample and the sizes that vary -> what is made of it, at any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autodiff import clean, differentiate
from autodiff.extents import Dim, ExtentScope
from autodiff.ir import Constant, Function, TensorType, Var, build_function, is_float, results
from autodiff.rewrite import Scope

__all__ = ["Places", "extents_of_size", "function_of", "joint_of", "resized"]

Places = Mapping[tuple[int, int], str]
"""By argument and axis: the symbol that stands there."""


def extents_of_size(args: Sequence[torch.Tensor], argument: int, axis: int, everywhere: bool) -> Places:
    """One symbol at an axis, and ``everywhere`` at all axes of the same size."""
    size = args[argument].shape[axis]
    if not everywhere:
        return {(argument, axis): "n"}
    return {(i, a): "n" for i, arg in enumerate(args) for a, extent in enumerate(arg.shape) if extent == size}


def function_of(
    build: Callable, args: Sequence[torch.Tensor], places: Places | None = None, scope: ExtentScope | None = None
) -> Function:
    """What ``build(scope, *params)`` describes, with symbols of ``scope`` at ``places``."""
    places = places or {}
    symbols: dict[str, Dim] = {}
    for (argument, axis), name in places.items():
        if name not in symbols:
            symbols[name] = scope.symbol(name, args[argument].shape[axis])
    params = []
    for index, arg in enumerate(args):
        extents = [symbols[places[index, axis]] if (index, axis) in places else n for axis, n in enumerate(arg.shape)]
        params.append(Var(f"p{index}", TensorType(extents, str(arg.dtype).removeprefix("torch."))))
    emitter = Scope([param.name for param in params])
    outputs = build(emitter, *params)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    bound = [out if isinstance(out, Var | Constant) else emitter.emit(out, f"y{i}") for i, out in enumerate(outputs)]
    return build_function(params, emitter.body, bound)


def joint_of(func: Function) -> Function:
    """All float results differentiated with respect to all float parameters, cleaned."""
    outputs = [index for index, output in enumerate(results(func)) if is_float(output)]
    return clean(differentiate(func, outputs, [index for index, param in enumerate(func.params) if is_float(param)]))


def resized(args: Sequence[torch.Tensor], places: Places, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """The arguments with elements repeated or dropped; indices stay below the smallest size."""
    least = min(sizes.values(), default=0)
    made = []
    for index, arg in enumerate(args):
        for (argument, axis), name in places.items():
            if argument == index:
                arg = arg.index_select(axis, torch.arange(sizes[name]) % arg.shape[axis])
        if not arg.is_floating_point() and arg.dtype != torch.bool and least < 5:
            arg = arg % least
        elif arg.is_floating_point():
            arg = arg + 1e-3 * torch.arange(arg.numel(), dtype=arg.dtype).reshape(arg.shape)
        made.append(arg.contiguous())
    return made
