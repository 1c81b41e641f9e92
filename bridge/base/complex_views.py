"""Views of complex tensors: compiled code takes and returns the two parts of each number in a last dimension."""

from __future__ import annotations

import torch

__all__ = ["as_complex", "as_parts", "is_parts_view", "offset_in", "view_in"]


def as_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as the real one of its parts, which shares its memory and its gradients; a real one as it is.

    One whose conjugation is pending is computed first.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(parts: torch.Tensor) -> torch.Tensor:
    """The complex tensor of parts in a last dimension, in the same memory."""
    return torch.view_as_complex(parts)


def is_parts_view(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether one of two tensors in one memory is complex and the other shows parts of its numbers as they are."""
    if view.is_complex() == base.is_complex() or view.is_conj() or base.is_conj():
        return False
    return view.dtype.to_real() == base.dtype.to_real()


def offset_in(view: torch.Tensor, base: torch.Tensor) -> int:
    """Where a view of ``base`` begins, from its first element on; real elements if one of the two is complex."""
    if view.is_complex() == base.is_complex():
        return view.storage_offset() - base.storage_offset()
    return view.storage_offset() * (1 + view.is_complex()) - base.storage_offset() * (1 + base.is_complex())


def view_in(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The view of this type and layout at an offset, as :func:`offset_in` has it."""
    if dtype.is_complex == base.is_complex():
        return base.as_strided(shape, stride, base.storage_offset() + offset)
    parts = as_parts(base)
    if not dtype.is_complex:
        return parts.as_strided(shape, stride, parts.storage_offset() + offset)
    pairs = (*shape, 2), (*(2 * step for step in stride), 1)
    return as_complex(parts.as_strided(*pairs, parts.storage_offset() + offset))
