"""In-place functions: a call that writes into its first tensor -> the function whose result that tensor is then.

``h.add_(x)`` is ``h = h + x`` if no other tensor has the memory (:meth:`bridge.capture.loops.writes.Writes.is_alone`)
and the result has the element type and the layout of ``h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from bridge.capture.loops.calls import Form

__all__ = ["keeps_form", "out_of_place"]

_METHODS = (
    *("add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "pow"),
    *("relu", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max", "masked_fill", "lerp", "addcmul", "addcdiv"),
    *("addmm", "baddbmm"),
)
_OPERATORS = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div"}

_SAME = {
    getattr(owner, written): getattr(torch.Tensor, name)
    for written, name in [*((f"{name}_", name) for name in _METHODS), *_OPERATORS.items()]
    for owner in (torch.Tensor, torch)
    if hasattr(owner, written)
}
"""By function that writes, the one that returns the same."""

_ACTIVATIONS = frozenset({F.relu, F.leaky_relu, F.elu, F.celu, F.selu, F.silu, F.mish, F.hardtanh})
"""Functions that write if they are told so."""


def out_of_place(func: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The function that returns what a call writes into its first tensor, and its keyword arguments; ``None`` for any
    other call."""
    if func in _ACTIVATIONS:
        return (func, kwargs | {"inplace": False}) if kwargs.get("inplace") is True else None
    same = _SAME.get(func)
    return None if same is None else (same, kwargs)


def keeps_form(forms: Sequence[Form]) -> bool:
    """Whether the result of such a function on tensors of these forms has the element type and the layout of the first
    one: it is a contiguous one of floating point."""
    first, *others = forms
    if not (first.dtype.is_floating_point and first.is_contiguous):
        return False
    widens = any(each.dtype != first.dtype and each.dtype.is_floating_point for each in others)
    return not widens and all(each.device == first.device for each in others)
