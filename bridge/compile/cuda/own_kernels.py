"""Kernels of our own that no program has: copies, numbers of the host, fills, each as a launch with one argument."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from bridge.compile.cuda.driver import LoadedKernel, kernels
from bridge.compile.cuda.nvrtc import compiled

__all__ = ["MOST", "MOST_NUMBERS", "NUMBERS", "THREADS", "VECTOR", "Copies", "Fill", "NumberCopies", "OwnKernels"]
__all__ += ["own_kernels"]

MOST = 8
"""Targets of one launch that copies."""
MOST_NUMBERS = 128
"""Targets of one that has its sources in its argument, of which the driver takes 4096 bytes."""
THREADS = 256
VECTOR = 16
"""Bytes that a thread copies or fills at once."""
NUMBERS = 16
"""Bytes of the host's for one target at most."""

_SOURCE = f"""
struct Copies {{ const char* from[{MOST}]; char* to[{MOST}]; long long bytes[{MOST}]; }};
struct Numbers {{ char* to[{MOST_NUMBERS}]; char from[{MOST_NUMBERS}][{NUMBERS}]; int bytes[{MOST_NUMBERS}]; }};
struct Fill {{ char* to; long long bytes; unsigned int word; }};

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

extern "C" __global__ void __launch_bounds__({THREADS}) bridge_fill(Fill fill) {{
  long long vectors = fill.bytes / {VECTOR}, rest = fill.bytes % {VECTOR};
  long long first = (long long)blockIdx.x * {THREADS} + threadIdx.x;
  int4 four = make_int4(fill.word, fill.word, fill.word, fill.word);
  for (long long i = first; i < vectors; i += (long long)gridDim.x * {THREADS}) ((int4*)fill.to)[i] = four;
  if (first < rest) fill.to[vectors * {VECTOR} + first] = (char)(fill.word >> 8 * (first % 4));
}}
"""


class Copies(ctypes.Structure):
    """Bytes from sources to targets, which begin where vectors do."""

    _fields_ = (
        ("source", ctypes.c_void_p * MOST),
        ("target", ctypes.c_void_p * MOST),
        ("nbytes", ctypes.c_longlong * MOST),
    )


class NumberCopies(ctypes.Structure):
    """Bytes that are in the argument, to targets."""

    _fields_ = (
        ("target", ctypes.c_void_p * MOST_NUMBERS),
        ("source", ctypes.c_char * NUMBERS * MOST_NUMBERS),
        ("nbytes", ctypes.c_int * MOST_NUMBERS),
    )


class Fill(ctypes.Structure):
    """Four bytes, again and again."""

    _fields_ = (("target", ctypes.c_void_p), ("nbytes", ctypes.c_longlong), ("word", ctypes.c_uint))


class OwnKernels(NamedTuple):
    """By what they do."""

    copy: LoadedKernel
    bring: LoadedKernel
    fill: LoadedKernel


@functools.cache
def own_kernels(index: int) -> OwnKernels:
    """Of a device, which is current."""
    major, minor = torch.cuda.get_device_capability(index)
    return OwnKernels(*kernels(compiled(_SOURCE, f"sm_{major}{minor}"), ("bridge_copy", "bridge_bring", "bridge_fill")))
