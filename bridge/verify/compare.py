"""Relative deviation of two tensors, and the tolerance that rounding explains, by dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

__all__ = ["deviation", "largest", "tolerance"]

#: Rounding in float64 stays below this share of a tensor's largest element, through networks of any usual depth.
EXACT = 1e-9
#: A tensor this much smaller than the largest of its kind is noise around zero (a key's bias under a softmax has a
#: gradient of zero), and is measured against that one.
NOISE = 1e-3


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The largest deviation that rounding explains: half of the digits of the narrowest floating type."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    eps = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
    return EXACT if eps <= torch.finfo(torch.float64).eps else math.sqrt(eps)


def largest(tensors: Sequence[torch.Tensor]) -> float:
    """The largest finite absolute value of floating point tensors."""
    sizes = [_size(tensor) for tensor in tensors if tensor.is_floating_point()]
    return max(sizes, default=0.0)


def _size(tensor: torch.Tensor) -> float:
    finite = tensor.detach()[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def deviation(found: torch.Tensor, wanted: torch.Tensor, *, scale: float = 0.0) -> float:
    """The largest difference as a share of ``wanted``'s largest element.

    It is ``inf`` where shapes differ, or values that are no numbers (or no floats) are not the same. ``scale``: the
    largest element of all tensors of the kind, see :data:`NOISE`.
    """
    if found.shape != wanted.shape:
        return math.inf
    if found.numel() == 0:
        return 0.0
    if not wanted.is_floating_point() or not found.is_floating_point():
        return 0.0 if torch.equal(found.to(torch.int64), wanted.to(torch.int64)) else math.inf
    found, wanted = found.detach().double(), wanted.detach().double()
    finite = torch.isfinite(wanted)
    odd = ~finite
    if not torch.equal(torch.isfinite(found), finite) or not torch.equal(found[odd].isnan(), wanted[odd].isnan()):
        return math.inf
    both = odd & ~wanted.isnan()
    if not torch.equal(found[both], wanted[both]):
        return math.inf
    difference = float((found[finite] - wanted[finite]).abs().max()) if bool(finite.any()) else 0.0
    if difference == 0.0:
        return 0.0
    return difference / max(_size(wanted), NOISE * scale, torch.finfo(torch.float64).tiny)
