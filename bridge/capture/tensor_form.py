"""Tensor form: what is known of a tensor beside its numbers, with extents where its sizes vary.

It stands where a traced graph of static sizes has a fake tensor. torch's symbolic sizes write down what they are asked
in an environment of torch's; once that has been read (:mod:`bridge.capture.symbolic_sizes`), nobody asks them any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autodiff.extents import Dim

__all__ = ["TensorForm"]


@dataclass(frozen=True, eq=False)
class TensorForm:
    """Shape and element type of a tensor; ``stride`` and ``device`` are ``None`` where nothing asks for them."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    stride: tuple[Dim, ...] | None = None
    requires_grad: bool = False
    device: torch.device | None = None

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def dim(self) -> int:
        return len(self.shape)

    def unsqueeze(self, dim: int) -> TensorForm:
        """With one more axis of extent 1, as ``torch.unsqueeze`` puts it."""
        place = dim % (len(self.shape) + 1)
        return TensorForm((*self.shape[:place], 1, *self.shape[place:]), self.dtype)

    def to(self, dtype: torch.dtype) -> TensorForm:
        """Of another element type."""
        return replace(self, dtype=dtype)
