"""Eager's gradients with zeros kept: a compiled backward computes no gradient for a result that nothing uses.

In eager, an overwritten or unselected value has a gradient of zeros, which an infinite or nan factor turns into nan
(``docs/limits.md``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.base.torch_internals import current_graph_task_id
from tests.operator_mode import OperatorMode

aten = torch.ops.aten

PRODUCTS = (aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
"""Products of a gradient and a factor."""
BILINEAR = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.linalg_cross.default)
"""Products whose elements are sums of products: zeros if an operand is all zeros."""


class Unreached(OperatorMode):
    """In a backward, keeps zeros: an elementwise operator's result where its gradient is zero, and a product with an
    all-zero operand."""

    def operator(self, func, args, kwargs):
        result = func(*args, **kwargs)
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
