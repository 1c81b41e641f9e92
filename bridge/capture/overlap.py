"""Overlap: views of one memory → whether they, or the elements of one of them, lie in the same place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.errors import Unsupported
from bridge.base.torch_internals import storage_id

__all__ = ["overlaps", "overlaps_itself", "share_elements"]

_Dim = tuple[int, tuple[int, int]]


def overlaps(results: Sequence[torch.Tensor]) -> list[Unsupported]:
    """Why results that a compiled call returns in memory of their own cannot be had so; empty where they can."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for result in results:
        by_storage.setdefault(storage_id(result), []).append(result)
    for group in by_storage.values():
        if any(share_elements(a, b) for position, a in enumerate(group) for b in group[:position]):
            reason = "returns overlapping parts of one tensor: what is written to one is seen in the other"
            hint = "return the whole tensor as well, or clones of the parts"
            return [Unsupported("views", "the module's result", reason, hint)]
    return []


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two tensors in one storage: whether a write to one could be seen in the other.

    Exact for what slicing, splitting, transposing and reshaping make of a dense tensor; ``True`` where it is not known
    (windows that slide over each other, different element types).
    """
    if not (a.numel() and b.numel()):
        return False
    if a.dtype != b.dtype:
        return True
    extents: dict[int, list[int]] = {}
    for which, tensor in enumerate((a, b)):
        for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if extent == 1 or stride == 0:
                continue
            found = extents.setdefault(stride, [1, 1])
            if found[which] > 1:
                return True
            found[which] = extent
    dims = [(stride, (of_a, of_b)) for stride, (of_a, of_b) in sorted(extents.items(), reverse=True)]
    return _meet(dims, b.storage_offset() - a.storage_offset())


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether elements of ``x`` may lie in the same place: what is written at one position is written at others."""
    reach = 0
    for stride, extent in sorted((stride, extent) for stride, extent in zip(x.stride(), x.shape, strict=True)):
        if extent > 1 and stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def _meet(dims: Sequence[_Dim], distance: int) -> bool:
    """Whether ``distance`` is a sum of ``stride * (i - j)`` with ``i`` and ``j`` within the two extents."""
    if not dims:
        return distance == 0
    most = sum(stride * (of_a - 1) for stride, (of_a, _) in dims)
    least = -sum(stride * (of_b - 1) for stride, (_, of_b) in dims)
    if not least <= distance <= most:
        return False
    (stride, (of_a, of_b)), rest = dims[0], dims[1:]
    if stride <= sum(inner * (max(extents) - 1) for inner, extents in rest):
        return True
    steps = distance // stride, distance // stride + 1
    return any(-of_b < step < of_a and _meet(rest, distance - step * stride) for step in steps)
