"""Views of complex tensors: compiled code takes and returns the two parts of each number in a last dimension."""

from __future__ import annotations

import torch

__all__ = ["as_complex", "as_parts"]


def as_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as the real one of its parts, which shares its memory and its gradients; a real one as it is.

    One whose conjugation is pending is computed first.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(parts: torch.Tensor) -> torch.Tensor:
    """The complex tensor of parts in a last dimension, in the same memory."""
    return torch.view_as_complex(parts)
