"""Images in channels_last: library functions that give theirs with channels as the last axis, and how those are shown.

What lies so is told from the strides that eager's tensor has. ``autodiff.channels_behind`` moves the permutations that
are made here behind what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax
from tvm.relax import Expr

from bridge.base.torch_internals import aten
from bridge.capture import TensorForm

__all__ = ["form_before_copies", "is_channels_last", "library_of_images", "read_from_behind"]

op = relax.op

_TO_BACK, _TO_FRONT = (0, 2, 3, 1), (0, 3, 1, 2)
"""Channels from the second place to the last, and back."""


def is_channels_last(form: Any) -> bool:
    """Whether eager's tensor has the strides of torch's channels_last and of nothing else."""
    if not isinstance(form, torch.Tensor) or form.ndim != 4 or not all(type(size) is int for size in form.shape):
        return False
    return form.is_contiguous(memory_format=torch.channels_last) and not form.is_contiguous()


def form_before_copies(node: fx.Node) -> Any:
    """The form of what a node is the same numbers as: a copy in another order of memory is none in a compiled call."""
    while node.target is aten.clone.default:
        node = node.args[0]
    return node.meta["val"]


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


def read_from_behind(importer, x: Expr, form: Any) -> Expr:
    """``x``, seen as a permutation of what has its channels behind where its memory has."""
    if not is_channels_last(form):
        return x
    return importer.emit(op.permute_dims(importer.emit(op.permute_dims(x, _TO_BACK)), _TO_FRONT))
