"""Torch's functions by what a recorder of calls makes of them: questions, views, draws, and those that end it."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from bridge.base.devices import TYPES

__all__ = ["DRAWING", "METADATA", "NEVER", "VIEWS"]

_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    *(f"is_{kind}" for kind in (*TYPES, "sparse", "mps")),
)
_QUESTIONS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("is_signed", "__len__", "get_device", "stride", "is_contiguous", "is_inference", "is_conj", "is_neg"),
)
METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(torch.Tensor, name) for name in _QUESTIONS]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled, torch.broadcast_shapes]
)
"""Functions that tell no numbers of a tensor's elements."""
VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT"))
NEVER = frozenset({"as_strided", "requires_grad_", "backward", "untyped_storage", "set_", "apply_", "map_"})
"""Names of functions that depend on more than the layouts and elements of their arguments, or change something."""

DRAWING = frozenset({F.dropout, torch.dropout, torch.rand, torch.randn, torch.rand_like, torch.randn_like})
"""Functions that draw once, or nothing where their arguments say so."""
