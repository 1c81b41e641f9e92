"""Copies between graphs: a few dense tensors, or numbers of the host, to where a graph reads them, in one launch.

Between kernels, a kernel takes its turn sooner than the GPU's copy engine, which a stream waits for on both sides; and
numbers of the host are a launch's arguments, which it takes along.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from bridge.base.torch_cuda import current_stream
from bridge.compile.cuda.driver import Kernel, kernels
from bridge.compile.cuda.nvrtc import compiled

__all__ = ["bring", "copy"]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Targets with their sources, of the same shapes and element types."""

_MOST = 8
"""Pairs of one launch."""
_THREADS, _MOST_BLOCKS = 256, 1024
_VECTOR = 16
"""Bytes that a thread copies at once."""
_NUMBERS = 16
"""Bytes of the host's for one target at most."""

_SOURCE = f"""
struct Copies {{ const char* from[{_MOST}]; char* to[{_MOST}]; long long bytes[{_MOST}]; }};
struct Numbers {{ char* to[{_MOST}]; char from[{_MOST}][{_NUMBERS}]; int bytes[{_MOST}]; }};

extern "C" __global__ void __launch_bounds__({_THREADS}) bridge_copy(Copies copies) {{
  const char* from = copies.from[blockIdx.y];
  char* to = copies.to[blockIdx.y];
  long long vectors = copies.bytes[blockIdx.y] / {_VECTOR}, rest = copies.bytes[blockIdx.y] % {_VECTOR};
  long long first = (long long)blockIdx.x * {_THREADS} + threadIdx.x;
  for (long long i = first; i < vectors; i += (long long)gridDim.x * {_THREADS})
    ((int4*)to)[i] = ((const int4*)from)[i];
  if (first < rest) to[vectors * {_VECTOR} + first] = from[vectors * {_VECTOR} + first];
}}

extern "C" __global__ void bridge_bring(Numbers numbers) {{
  if (threadIdx.x < numbers.bytes[blockIdx.x])
    numbers.to[blockIdx.x][threadIdx.x] = numbers.from[blockIdx.x][threadIdx.x];
}}
"""


class _Copies(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p * _MOST),
        ("target", ctypes.c_void_p * _MOST),
        ("nbytes", ctypes.c_longlong * _MOST),
    )


class _Numbers(ctypes.Structure):
    _fields_ = (
        ("target", ctypes.c_void_p * _MOST),
        ("source", ctypes.c_char * _NUMBERS * _MOST),
        ("nbytes", ctypes.c_int * _MOST),
    )


@functools.cache
def _kernels(index: int) -> list[Kernel]:
    """Of a device, which is current."""
    major, minor = torch.cuda.get_device_capability(index)
    return kernels(compiled(_SOURCE, f"sm_{major}{minor}"), ("bridge_copy", "bridge_bring"))


def copy(pairs: Pairs) -> None:
    """Copies tensors on the current device's current stream."""
    plain = []
    for target, source in pairs:
        if _is_plain(target, source):
            plain.append((target, source))
        else:
            target.copy_(source)
    for first in range(0, len(plain), _MOST):
        _copy(plain[first : first + _MOST])


def _is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether it is a copy of bytes, vector by vector."""
    return (
        source.is_cuda
        and target.device == source.device
        and target.dtype == source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
        and not (target.data_ptr() | source.data_ptr()) % _VECTOR
    )


def _copy(pairs: Pairs) -> None:
    copies, index = _Copies(), pairs[0][0].device.index
    for place, (target, source) in enumerate(pairs):
        copies.source[place], copies.target[place] = source.data_ptr(), target.data_ptr()
        copies.nbytes[place] = source.nbytes
    vectors = max(source.nbytes for _, source in pairs) // _VECTOR
    blocks = min(max(1, -(-vectors // _THREADS)), _MOST_BLOCKS)
    _kernels(index)[0]((blocks, len(pairs)), _THREADS, copies, current_stream(index))


def bring(pairs: Pairs) -> None:
    """Copies a few bytes of the host's, to each target, on the current device's current stream: what the sources hold
    now."""
    for first in range(0, len(pairs), _MOST):
        _bring(pairs[first : first + _MOST])


def _bring(pairs: Pairs) -> None:
    if not pairs[0][0].is_cuda:
        for target, source in pairs:
            target.copy_(source)
        return
    numbers, index = _Numbers(), pairs[0][0].device.index
    for place, (target, source) in enumerate(pairs):
        numbers.target[place], numbers.nbytes[place] = target.data_ptr(), source.nbytes
        ctypes.memmove(ctypes.addressof(numbers.source[place]), source.data_ptr(), source.nbytes)
    _kernels(index)[1]((len(pairs), 1), _NUMBERS, numbers, current_stream(index))
