"""Tile kernels on a processor: the text of a product's kernel, with its macros for OpenCL C → PoCL → numpy arrays.

A cluster of blocks is one work group here, in which each block has its part of the local memory.
"""

from __future__ import annotations

import numpy as np

from bridge.compile.cuda.tile_source import Tile, kernel_of
from tests.opencl import device

__all__ = ["multiplied"]

_OPENCL = r"""
#define GLOBAL __global
#define LOCAL __local
#define DEVICE static
#define KERNEL __kernel __attribute__((reqd_work_group_size(THREADS, RANKS, 1))) void
#define SHARED                                                                                      \
  __local float4 shared_memory[RANKS * NUMBERS / 4];                                                \
  __local float* shared = (__local float*)shared_memory + RANK * NUMBERS;
#define THREAD ((int)get_local_id(0))
#define RANK ((int)get_local_id(1))
#define ROW_TILE ((int)get_group_id(1))
#define COLUMN_TILE ((int)get_group_id(2))
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#define CLUSTER_BARRIER BARRIER
#define COMMIT
#define WAIT
#define WAIT_ALL
#define FMA(x, y, z) fma(x, y, z)
#define VECTOR(x, y, z, w) ((float4)(x, y, z, w))
#define OF_RANK(at, of) (*(const __local float4*)((at) + ((of) - rank) * NUMBERS))
#define LONG long
static void copy(__local float* to, const __global float* from, int bytes) {
  for (int i = 0; i < 4; ++i) to[i] = 4 * i < bytes ? from[i] : 0.0f;
}
"""

_BEHIND = 64
"""Numbers behind the result, which stay as they were."""


def multiplied(tile: Tile, parts: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b`` by a tile's kernel, the inner axis in so many parts; memory between rows is nan."""
    opencl, context, queue = device()
    (m, k), n, behind = a.shape, b.shape[1], np.float32(7)
    text = f"#define RANKS {parts}\n#define NUMBERS {tile.shared_bytes // 4}\n{_OPENCL}{kernel_of(tile)}"
    kernel = getattr(opencl.Program(context, text).build(["-cl-opt-disable"]), tile.name)
    given = [_padded(a if tile.a_inner else a.T), _padded(b.T if tile.b_inner else b)]
    out = np.full(m * n + _BEHIND, behind)
    flags = opencl.mem_flags.READ_WRITE | opencl.mem_flags.COPY_HOST_PTR
    memory = [opencl.Buffer(context, flags, hostbuf=each) for each in (*given, out)]
    numbers = [np.int32(each) for each in (m, n, k, given[0].shape[1], given[1].shape[1])]
    extents = tile.threads, parts * -(-m // tile.rows), -(-n // tile.columns)
    kernel(queue, extents, (tile.threads, parts, 1), *memory, *numbers)
    opencl.enqueue_copy(queue, out, memory[2])
    queue.finish()
    assert (out[m * n :] == behind).all()
    return out[: m * n].reshape(m, n)


def _padded(x: np.ndarray) -> np.ndarray:
    """The matrix with rows that begin at multiples of 16 bytes, as the first columns of a wider one."""
    made = np.full((x.shape[0], -(-x.shape[1] // 4) * 4 + 4), np.nan, np.float32)
    made[:, : x.shape[1]] = x
    return made
