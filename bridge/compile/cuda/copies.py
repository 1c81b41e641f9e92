"""Copies between graphs: a few dense tensors, or numbers on the host, to the memory that a graph reads, in one launch.

Between kernels, a kernel starts sooner than the GPU's copy engine, for which a stream waits before and after; numbers
on the host become arguments of the launch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bridge.base.torch_cuda import current_stream
from bridge.compile.cuda.driver_graphs import LoadedKernel, kernels
from bridge.compile.cuda.nvrtc import compiled

__all__ = ["Pairs", "bring", "copy"]

MOST = 8
"""Targets of one copying launch."""
MOST_NUMBERS = 128
"""Targets of one launch with sources in its argument, which the driver limits to 4096 bytes."""
THREADS = 256
VECTOR = 16
"""Bytes that a thread copies at once."""
NUMBERS = 16
"""Maximum bytes from the host for one target."""

_SOURCE = f"""
struct Copies {{ const char* from[{MOST}]; char* to[{MOST}]; long long bytes[{MOST}]; }};
struct Numbers {{ char* to[{MOST_NUMBERS}]; char from[{MOST_NUMBERS}][{NUMBERS}]; int bytes[{MOST_NUMBERS}]; }};

extern "C" __global__ void __launch_bounds__({THREADS}) bridge_copy(Copies copies) {{
  const char* from = copies.from[blockIdx.y];
  char* to = copies.to[blockIdx.y];
  long long vectors = copies.bytes[blockIdx.y] / {VECTOR}, rest = copies.bytes[blockIdx.y] % {VECTOR};
  long long first = (long long)blockIdx.x * {THREADS} + threadIdx.x;
  for (long long i = first; i < vectors; i += (long long)gridDim.x * {THREADS})
    ((int4*)to)[i] = ((const int4*)from)[i];
  if (first < rest) to[vectors * {VECTOR} + first] = from[vectors * {VECTOR} + first];
}}

extern "C" __global__ void bridge_bring(Numbers numbers) {{
  if (threadIdx.x < numbers.bytes[blockIdx.x])
    numbers.to[blockIdx.x][threadIdx.x] = numbers.from[blockIdx.x][threadIdx.x];
}}
"""


class Copies(ctypes.Structure):
    """Argument of a copy: sources and targets, aligned for vectors."""

    _fields_ = (
        ("source", ctypes.c_void_p * MOST),
        ("target", ctypes.c_void_p * MOST),
        ("nbytes", ctypes.c_longlong * MOST),
    )


class NumberCopies(ctypes.Structure):
    """Argument of a copy of numbers: targets, with the bytes in the argument itself."""

    _fields_ = (
        ("target", ctypes.c_void_p * MOST_NUMBERS),
        ("source", ctypes.c_char * NUMBERS * MOST_NUMBERS),
        ("nbytes", ctypes.c_int * MOST_NUMBERS),
    )


class OwnKernels(NamedTuple):
    """This package's kernels on one device."""

    copy: LoadedKernel
    bring: LoadedKernel


@functools.cache
def own_kernels(index: int) -> OwnKernels:
    """The kernels of a device, which must be current."""
    major, minor = torch.cuda.get_device_capability(index)
    return OwnKernels(*kernels(compiled(_SOURCE, f"sm_{major}{minor}"), ("bridge_copy", "bridge_bring")))


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
