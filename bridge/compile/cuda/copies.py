"""Copies between graphs: a few dense tensors, or numbers on the host, to the memory that a graph reads, in one launch.

Between kernels, a kernel starts sooner than the GPU's copy engine, for which a stream waits before and after; numbers
on the host become arguments of the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from bridge.base.torch_cuda import current_stream
from bridge.compile.cuda.driver_graphs import (
    MOST,
    MOST_NUMBERS,
    NUMBERS,
    THREADS,
    VECTOR,
    Copies,
    NumberCopies,
    own_kernels,
)

__all__ = ["Pairs", "bring", "copy"]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""``(target, source)`` pairs of the same shapes and element types."""

_MOST_BLOCKS = 1024


def copy(pairs: Pairs) -> None:
    """Copies tensors on the current device's current stream."""
    plain = []
    for target, source in pairs:
        if _is_plain(target, source):
            plain.append((target, source))
        else:
            target.copy_(source)
    for first in range(0, len(plain), MOST):
        _copy(plain[first : first + MOST])


def _is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy of bytes in vectors suffices."""
    return (
        source.is_cuda
        and target.device == source.device
        and target.dtype == source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
        and not (target.data_ptr() | source.data_ptr()) % VECTOR
    )


def _copy(pairs: Pairs) -> None:
    copies, index = Copies(), pairs[0][0].device.index
    for place, (target, source) in enumerate(pairs):
        copies.source[place], copies.target[place] = source.data_ptr(), target.data_ptr()
        copies.nbytes[place] = source.nbytes
    vectors = max(source.nbytes for _, source in pairs) // VECTOR
    blocks = min(max(1, -(-vectors // THREADS)), _MOST_BLOCKS)
    own_kernels(index).copy((blocks, len(pairs)), THREADS, copies, current_stream(index))


def bring(pairs: Pairs) -> None:
    """Copies a few bytes from the host to each target, on the current device's current stream; reads sources now."""
    for first in range(0, len(pairs), MOST_NUMBERS):
        _bring(pairs[first : first + MOST_NUMBERS])


def _bring(pairs: Pairs) -> None:
    if not pairs[0][0].is_cuda:
        for target, source in pairs:
            target.copy_(source)
        return
    index = pairs[0][0].device.index
    numbers = NumberCopies()
    for place, (target, source) in enumerate(pairs):
        numbers.target[place], numbers.nbytes[place] = target.data_ptr(), target.nbytes
        ctypes.memmove(ctypes.addressof(numbers.source[place]), source.data_ptr(), target.nbytes)
    own_kernels(index).bring((len(pairs), 1), NUMBERS, numbers, current_stream(index))
