"""Torch internals of CUDA: what ``torch.cuda`` looks up in a microsecond, in a tenth of one.

Like :mod:`bridge.base.torch_internals`, and for the same lint test: no other file names what is private here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bridge.base.torch_internals import _find as find

__all__ = ["current_device", "current_stream", "empty_strided"]

current_device: Callable[[], int] = find("torch._C._cuda_getDevice", torch.cuda.current_device)
"""The index of this thread's current device."""

current_stream: Callable[[int], int] = find(
    "torch._C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""A device's index → a number that tells this thread's current stream on it from the others."""

empty_strided: Callable[..., torch.Tensor] = find(
    "torch._C._dynamo.guards._empty_strided_cuda",
    lambda *form: torch.empty_strided(*form[:2], dtype=form[2], device=torch.device("cuda", current_device())),
)
"""Shape, strides, element type → a tensor on the current device."""
