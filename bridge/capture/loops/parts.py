"""Parts of tensors in a replay, by as few operators as do it: each costs a trace, and more if its layouts are new."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.capture.loops.calls import Part

__all__ = ["in_order", "moved", "narrowed", "put", "take"]


def take(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor."""
    return whole.select(part.dim, part.begin) if part.squeezed else whole.narrow(part.dim, part.begin, part.extent)


def narrowed(whole: torch.Tensor, dim: int, begin: int, extent: int) -> torch.Tensor:
    """A part of a tensor; the tensor itself, if that is all of it."""
    return whole if extent == whole.shape[dim] else whole.narrow(dim, begin, extent)


def moved(steps: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor whose first axis has become this one."""
    return in_order(steps, [*range(1, dim + 1), 0, *range(dim + 1, steps.dim())])


def in_order(whole: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """A tensor with its axes in this order."""
    return whole if list(axes) == sorted(axes) else whole.permute(*axes)


def put(whole: torch.Tensor, value: torch.Tensor, into: Part) -> torch.Tensor:
    """A tensor with another value of a part."""
    if into.squeezed:
        return torch.select_scatter(whole, value, into.dim, into.begin)
    return torch.slice_scatter(whole, value, into.dim, into.begin, into.begin + into.extent)
