"""Eager's results if only an operator with an unused result raises, which a compiled call does not run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.operator_mode import OperatorMode


class Unraised(OperatorMode):
    """Runs an operator that raises again, on zeros, and fills its results with a number.

    Two runs with different numbers agree only where nothing uses these results.
    """

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def operator(self, func, args, kwargs):
        try:
            return func(*args, **kwargs)
        except (IndexError, RuntimeError):
            if _adds_nothing(func, args):
                return args[0]
            result = func(*_zeroed(func, args), **pytree.tree_map_only(Tensor, torch.zeros_like, kwargs))
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            if not tensors:
                raise  # an assertion, or a scalar read by Python: it must raise
            for tensor in tensors if not _moves_zeros(func, args) else ():
                tensor.fill_(self.factor)
            return result


def _adds_nothing(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether it adds zeros to its first argument: the gradient of an overwritten result."""
    floats = [arg for arg in args[1:] if isinstance(arg, Tensor) and arg.is_floating_point()]
    name = func.overloadpacket.__name__.strip("_")
    adds = name in _ADD or (name in _PUT and len(args) > 3 and args[3] is True)
    return adds and bool(floats) and not any(value.any() for value in floats)


def _moves_zeros(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether it moves zeros out of or into an all-zero gradient: the gradient of an overwritten result."""
    name = func.overloadpacket.__name__.strip("_")
    if name not in _TAKE + _PUT + _FILL or torch._C._current_autograd_node() is None:
        return False
    values = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    values += [arg for arg in args[3:] if name in _FILL and isinstance(arg, (bool, int, float))]
    return not any(torch.as_tensor(value).any() for value in values)


_ADD = ("index_add", "scatter_add")
_PUT = ("index_put", "index_put_impl", "put")
"""Operators in gradients of gathers; the second line only if they accumulate."""
_TAKE = ("take", "index", "gather", "index_select")
"""Further operators in gradients of scatters."""
_FILL = ("scatter", "index_fill")
"""In gradients of operators that write a number, these write a zero there. The value is the fourth argument."""


def _zeroed(func: torch._ops.OpOverload, args: tuple) -> list[Any]:
    """Zeros for the arguments, except for written ones."""
    written = [bool(a.alias_info and a.alias_info.is_write) for a in func._schema.arguments]
    return [
        arg if write else pytree.tree_map_only(Tensor, torch.zeros_like, arg)
        for arg, write in zip(args, written, strict=False)
    ]
