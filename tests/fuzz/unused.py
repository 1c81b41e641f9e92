"""What eager returns where only an operator whose result nothing uses raises: such operators do not run here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Unraised"]


class Unraised(TorchDispatchMode):
    """An operator that raises runs again, on zeros, and what it computes becomes a number.

    Two runs with other numbers give the same values only where nothing uses these results.
    """

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (IndexError, RuntimeError):
            if _adds_nothing(func, args):
                return args[0]
            result = func(*_zeroed(func, args), **pytree.tree_map_only(Tensor, torch.zeros_like, kwargs))
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            if not tensors:
                raise  # an assertion, a number that Python reads: to raise is what it is there for
            for tensor in tensors if not _moves_zeros(func, args) else ():
                tensor.fill_(self.factor)
            return result


def _adds_nothing(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether it adds zeros to its first argument: the gradient of a result that was overwritten."""
    floats = [arg for arg in args[1:] if isinstance(arg, Tensor) and arg.is_floating_point()]
    name = func.overloadpacket.__name__.strip("_")
    adds = name in _ADD or (name in _PUT and len(args) > 3 and args[3] is True)
    return adds and bool(floats) and not any(value.any() for value in floats)


def _moves_zeros(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether it takes numbers out of a gradient that is zero, or puts zeros there: that of an overwritten result."""
    if func.overloadpacket.__name__.strip("_") not in _TAKE + _PUT or torch._C._current_autograd_node() is None:
        return False
    return not any(arg.any() for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())


_ADD = ("index_add", "scatter_add")
_PUT = ("index_put", "index_put_impl", "put")
"""What the gradients of gathers are made with; those of the second line if they accumulate."""
_TAKE = ("take", "index", "gather", "index_select")
"""What the gradients of scatters are made with, beside those."""


def _zeroed(func: torch._ops.OpOverload, args: tuple) -> list[Any]:
    """The arguments, zero but for those that the operator writes into."""
    written = [bool(a.alias_info and a.alias_info.is_write) for a in func._schema.arguments]
    return [
        arg if write else pytree.tree_map_only(Tensor, torch.zeros_like, arg)
        for arg, write in zip(args, written, strict=False)
    ]
