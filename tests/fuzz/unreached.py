"""What eager's gradients are where zeros stay zeros: of a result that nothing is computed from no gradient comes here.

What was overwritten, or not picked, has a gradient of zeros in eager, which an infinite or nan factor makes nan of
(``docs/limits.md``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.base.torch_internals import current_graph_task_id

__all__ = ["Unreached"]

aten = torch.ops.aten

PRODUCTS = (aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
"""Of a gradient and a factor."""
BILINEAR = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.linalg_cross.default)
"""Whose elements are sums of products: zeros where all of an operand is."""


class Unreached(TorchDispatchMode):
    """In a backward, where the gradient that an elementwise operator gets is zero, so is its result; and a product of
    zeros alone is zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if current_graph_task_id() == -1 or not isinstance(result, Tensor):
            return result
        if func in BILINEAR:
            return result if all(operand.any() for operand in args[:2]) else torch.zeros_like(result)
        for operand in _gradients(func, args):
            if isinstance(operand, Tensor) and operand.shape == result.shape:
                result = torch.where(operand == 0, torch.zeros_like(result), result)
        return result


def _gradients(func: torch._ops.OpOverload, args: tuple) -> tuple:
    """The operands that may be the gradient of an elementwise operator's result."""
    if func is aten.mul.Tensor:
        return args[:2]
    is_one = func in PRODUCTS or func.overloadpacket.__name__.endswith("_backward")
    return args[:1] if is_one else ()
