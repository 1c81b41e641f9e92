"""Images in channels_last: library functions that give theirs with channels as the last axis, and how those are shown.

What lies so is told from the strides that eager's tensor has. ``autodiff.channels_behind`` moves the permutations that
are made here behind what follows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from autodiff.ir import Expr
from bridge.aten.computed_from import computed_from
from bridge.base.torch_internals import aten
from bridge.capture import TensorForm

__all__ = ["is_channels_last", "library_of_images", "lies_behind", "read_from_behind"]

op = relax.op

_TO_BACK, _TO_FRONT = (0, 2, 3, 1), (0, 3, 1, 2)
"""Channels from the second place to the last, and back."""


def is_channels_last(form: Any) -> bool:
    """Whether eager's tensor has the strides of torch's channels_last and of nothing else."""
    if not isinstance(form, torch.Tensor) or form.ndim != 4 or not all(type(size) is int for size in form.shape):
        return False
    return form.is_contiguous(memory_format=torch.channels_last) and not form.is_contiguous()


def lies_behind(node: fx.Node) -> bool:
    """Whether a value is computed in channels_last: eager's lies so, or is made of such a one point by point, or in
    groups of channels, in another order that a copy gave it. Such copies are none in a compiled call."""
    return computed_from(node, lambda each: is_channels_last(each.meta.get("val")), _alike)


def _alike(node: fx.Node) -> list[fx.Node]:
    """The operands that a value is computed of in their own order of memory."""
    if node.target is operator.getitem and node.args[0].target is aten.native_group_norm.default:
        return [node.args[0].args[0]] if node.args[1] == 0 else []
    if node.target is not aten.clone.default and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    extents = node.meta["val"].shape
    return [each for each in node.all_input_nodes if getattr(each.meta.get("val"), "shape", None) == extents]


def library_of_images(importer, name: str, args: Sequence[Any], form: Any) -> Expr | tuple[Expr, ...]:
    """A library call whose result is (or results are) of that form: by the function named ``last`` where it lies so."""
    several = isinstance(form, tuple | list)
    forms = tuple(form) if several else (form,)
    goes_last = is_channels_last(forms[0])
    if goes_last:
        name = f"{name}_last"
        forms = tuple(TensorForm(tuple(each.shape[axis] for axis in _TO_BACK), each.dtype) for each in forms)
    made = importer.library(name, args, forms if several else forms[0])
    items = tuple(importer.item(made, index) for index in range(len(forms))) if several else (made,)
    if goes_last:
        items = tuple(importer.emit(op.permute_dims(item, _TO_FRONT)) for item in items)
    return items if several else items[0]


def read_from_behind(importer, x: Expr) -> Expr:
    """``x``, seen as a permutation of what has its channels behind."""
    return importer.emit(op.permute_dims(importer.emit(op.permute_dims(x, _TO_BACK)), _TO_FRONT))
