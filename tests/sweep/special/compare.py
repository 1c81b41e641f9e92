"""Comparison at special points: our results beside all of eager's → equal, justified, differing.

Eager's vectorized and scalar code differ in a few places, so eager runs several times: all points in one tensor,
strided, and each point alone. Any of these results is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 6
"""The largest distance of two roundings of one number, in units in the last place."""


def same(ours: Tensor, wanted: Tensor) -> Tensor:
    """Element by element: nan beside nan, the same infinity, the same zero, or the same number to a few ulp."""
    both_nan = ours.isnan() & wanted.isnan()
    if not ours.is_floating_point():
        return ours == wanted
    zero = (ours == 0) & (wanted == 0)
    equal = (ours == wanted) & (~zero | (ours.signbit() == wanted.signbit()))
    return both_nan | equal | (close(ours, wanted) & ~zero)


def close(ours: Tensor, wanted: Tensor) -> Tensor:
    """Finite and within :data:`ULPS`."""
    info = torch.finfo(ours.dtype)
    a, b = ours.double(), wanted.double()
    unit = torch.maximum(a.abs(), b.abs()).clamp(min=info.smallest_normal) * info.eps
    return a.isfinite() & b.isfinite() & ((a - b).abs() <= ULPS * unit)


def close_to_exact(ours: Tensor, wanted: Tensor, exact: Tensor) -> Tensor:
    """Finite, and about as far from the float64 result as eager is, or within a rounding of the largest in its row."""
    info = torch.finfo(ours.dtype)
    a, b, exact = ours.double(), wanted.double(), exact.double()
    error, eager = (a - exact).abs(), (b - exact).abs()
    eager = eager.nan_to_num(0.0, 0.0, 0.0)
    size = torch.maximum(b.abs(), exact.abs()).nan_to_num(0.0, 0.0, 0.0)
    if a.dim() > 1:
        eager, size = (each.flatten(1).amax(1).reshape(-1, *[1] * (a.dim() - 1)) for each in (eager, size))
    signs = (a == 0) & (b == 0) & (ours.signbit() != wanted.signbit())
    rounding = 2 * eager + ULPS * info.eps * size.clamp(min=info.smallest_normal)
    return ~signs & a.isfinite() & b.isfinite() & (error <= rounding)
