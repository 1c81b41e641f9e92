"""Tiled product: the tile of a product of float32 matrices → its kernel's CUDA C.

A block computes a tile of the result, a thread a small one in registers. Operands pass through shared memory, several
steps of the inner axis ahead of the arithmetic. The inner axis is shared out twice: each step among the slices of a
block, all steps among the blocks of a cluster, which read each other's sums at the end. Sums are added in a fixed
order: the same numbers give the same bits.

The text is plain C but for the macros of :data:`CUDA`; ``tests/opencl_products.py`` has them for OpenCL.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CUDA", "Tile", "kernel_of"]

_VECTOR = 4
"""Numbers of an access of 16 bytes."""

_PAD = 8
"""Numbers behind each row of partial sums, which puts four rows into different banks of shared memory."""

MOST_RANKS = 8
"""Blocks of a cluster, on any GPU that has clusters: of compute capability 9.0. Kernels want 8.0."""

CUDA = r"""
#define GLOBAL
#define LOCAL
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
#define SHARED extern __shared__ float4 shared_memory[]; float* shared = (float*)shared_memory;
#define THREAD ((int)threadIdx.x)
#define ROW_TILE ((int)blockIdx.y)
#define COLUMN_TILE ((int)blockIdx.z)
#define RANK ((int)blockIdx.x)
#define RANKS ((int)gridDim.x)
#define BARRIER __syncthreads()
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory")
#define WAIT_ALL asm volatile("cp.async.wait_all;" ::: "memory")
#if __CUDA_ARCH__ >= 900
#define CLUSTER_BARRIER asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory")
#else
#define CLUSTER_BARRIER
#endif
#define FMA(x, y, z) __fmaf_rn(x, y, z)
#define VECTOR(x, y, z, w) make_float4(x, y, z, w)
#define OF_RANK(at, rank) of_rank(at, rank)
#define LONG long long

DEVICE unsigned int shared_address(const float* at) {
  unsigned int address;
  asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(at));
  return address;
}
// 16 bytes of shared memory: so many of them are read, zeros follow
DEVICE void copy(float* to, const float* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
DEVICE float4 of_rank(const float* at, int rank) {
#if __CUDA_ARCH__ >= 900
  float4 x;
  unsigned int there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(there) : "memory");
  return x;
#else
  return *(const float4*)at;  // there are no clusters: each block is one
#endif
}
"""

_KERNEL = r"""
DEVICE int inside(int bytes) { return bytes < 0 ? 0 : bytes > 16 ? 16 : bytes; }

// the next step of an operand into shared memory: lines of numbers that are neighbours in memory, a thread 16 bytes of
// every so many lines
#define FETCH(X, Y, to) \
  { \
    const int bytes = inside(4 * span_##Y); \
    _Pragma("unroll") for (int i = 0; i < (X##_LINES + X##_STRIDE - 1) / X##_STRIDE; ++i) \
      if (X##_LINES % X##_STRIDE == 0 || line_##Y + i * X##_STRIDE < X##_LINES) \
        copy((to) + i * X##_STRIDE * X##_PITCH, next_##Y + i * gap_##Y, \
             have_##Y > i * X##_STRIDE ? bytes : 0); \
    next_##Y += X##_IS_INNER ? INNER : (LONG)INNER * step_##Y; \
    if (X##_IS_INNER) span_##Y -= INNER; else have_##Y -= INNER; \
  }

#define FETCH_BOTH \
  { \
    FETCH(A, a, shared + fill + place_a) \
    FETCH(B, b, shared + fill + place_b) \
    fill = fill == (STAGES - 1) * STAGE ? 0 : fill + STAGE; \
  }

// where a thread begins: its line and its place therein, numbers that are left of lines and of a line, and memory
#define OPERAND(X, Y, first, count) \
  const int line_##Y = thread / X##_PER_LINE, within_##Y = thread % X##_PER_LINE * 4; \
  const int across_##Y = X##_IS_INNER ? first : start, along_##Y = X##_IS_INNER ? start : first; \
  const GLOBAL float* next_##Y = Y + (LONG)(across_##Y + line_##Y) * step_##Y + along_##Y + within_##Y; \
  int have_##Y = (X##_IS_INNER ? count - first : k - start) - line_##Y; \
  int span_##Y = (X##_IS_INNER ? k - start : count - first) - within_##Y; \
  const LONG gap_##Y = (LONG)X##_STRIDE * step_##Y;

#define STAGE (A_LINES * A_PITCH + B_LINES * B_PITCH)

KERNEL NAME(const GLOBAL float* a, const GLOBAL float* b, GLOBAL float* c,
            int m, int n, int k, int step_a, int step_b) {
  SHARED
  const int thread = THREAD, rank = RANK, ranks = RANKS;
  const int row = ROW_TILE * ROWS_TILE, column = COLUMN_TILE * COLUMNS_TILE;
  const int slice = thread / (ACROSS * DOWN), y = thread / ACROSS % DOWN, x = thread % ACROSS;
  const int all_steps = (k + INNER - 1) / INNER, steps = (all_steps + ranks - 1) / ranks;
  const int start = rank * steps * INNER;
  OPERAND(A, a, row, m)
  OPERAND(B, b, column, n)
  const int place_a = line_a * A_PITCH + within_a, place_b = A_LINES * A_PITCH + line_b * B_PITCH + within_b;
  int fill = 0, use = 0;

  float sum[ROWS][COLUMNS];
  #pragma unroll
  for (int i = 0; i < ROWS; ++i)
    #pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sum[i][j] = 0.0f;

  #pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < steps) FETCH_BOTH
    COMMIT;
  }
  #pragma unroll 1
  for (int number = 0; number < steps; ++number) {
    WAIT;
    BARRIER;
    if (number + STAGES - 1 < steps) FETCH_BOTH
    COMMIT;
    const LOCAL float* from_a = shared + use;
    const LOCAL float* from_b = from_a + A_LINES * A_PITCH;
    use = use == (STAGES - 1) * STAGE ? 0 : use + STAGE;
    #pragma unroll
    for (int inner = 0; inner < INNER / SLICES; inner += 4) {
      const int at = slice * (INNER / SLICES) + inner;
      float part_b[COLUMNS][4];
      #pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        if (B_IS_INNER) {
          float4 v = *(const LOCAL float4*)(from_b + (x + j * ACROSS) * (INNER + 4) + at);
          part_b[j][0] = v.x; part_b[j][1] = v.y; part_b[j][2] = v.z; part_b[j][3] = v.w;
        } else if (j < 4) {
          #pragma unroll
          for (int group = 0; group < COLUMNS / 4; ++group) {
            float4 v = *(const LOCAL float4*)(from_b + (at + j) * COLUMNS_TILE + (x + group * ACROSS) * 4);
            part_b[group * 4][j] = v.x; part_b[group * 4 + 1][j] = v.y;
            part_b[group * 4 + 2][j] = v.z; part_b[group * 4 + 3][j] = v.w;
          }
        }
      }
      float part_a[ROWS][4];
      #pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (A_IS_INNER) {
          float4 v = *(const LOCAL float4*)(from_a + (y + i * DOWN) * (INNER + 4) + at);
          part_a[i][0] = v.x; part_a[i][1] = v.y; part_a[i][2] = v.z; part_a[i][3] = v.w;
        } else if (i < 4) {
          #pragma unroll
          for (int group = 0; group < ROWS / 4; ++group) {
            float4 v = *(const LOCAL float4*)(from_a + (at + i) * ROWS_TILE + (y + group * DOWN) * 4);
            part_a[group * 4][i] = v.x; part_a[group * 4 + 1][i] = v.y;
            part_a[group * 4 + 2][i] = v.z; part_a[group * 4 + 3][i] = v.w;
          }
        }
      }
      #pragma unroll
      for (int l = 0; l < 4; ++l)
        #pragma unroll
        for (int i = 0; i < ROWS; ++i)
          #pragma unroll
          for (int j = 0; j < COLUMNS; ++j) sum[i][j] = FMA(part_a[i][l], part_b[j][l], sum[i][j]);
    }
  }
  WAIT_ALL;
  BARRIER;

  LOCAL float* mine = shared + slice * ROWS_TILE * PITCH;
  #pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int down = A_IS_INNER ? y + i * DOWN : (y + i / 4 * DOWN) * 4 + i % 4;
    #pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      if (B_IS_INNER) mine[down * PITCH + x + j * ACROSS] = sum[i][j];
      else if (j % 4 == 0)
        *(LOCAL float4*)(mine + down * PITCH + (x + j / 4 * ACROSS) * 4) =
            VECTOR(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
    }
  }
  BARRIER;
  if (SLICES > 1 && ranks > 1) {
    for (int i = thread; i < ROWS_TILE * COLUMNS_TILE / 4; i += THREADS) {
      LOCAL float* at = shared + i / (COLUMNS_TILE / 4) * PITCH + i % (COLUMNS_TILE / 4) * 4;
      float4 total = *(LOCAL float4*)at;
      #pragma unroll
      for (int j = 1; j < SLICES; ++j) {
        float4 v = *(LOCAL float4*)(at + j * ROWS_TILE * PITCH);
        total.x += v.x; total.y += v.y; total.z += v.z; total.w += v.w;
      }
      *(LOCAL float4*)at = total;
    }
  }
  if (ranks > 1) CLUSTER_BARRIER;
  for (int i = thread + rank * THREADS; i < ROWS_TILE * COLUMNS_TILE / 4; i += THREADS * ranks) {
    const int down = i / (COLUMNS_TILE / 4), within = i % (COLUMNS_TILE / 4) * 4;
    if (row + down >= m || column + within >= n) continue;
    const LOCAL float* at = shared + down * PITCH + within;
    float4 total;
    if (ranks > 1) {
      float4 parts[MOST_RANKS];
      #pragma unroll
      for (int j = 0; j < MOST_RANKS; ++j)
        if (j < ranks) parts[j] = OF_RANK(at, j);
      total = parts[0];
      #pragma unroll
      for (int j = 1; j < MOST_RANKS; ++j)
        if (j < ranks) {
          total.x += parts[j].x; total.y += parts[j].y; total.z += parts[j].z; total.w += parts[j].w;
        }
    } else {
      total = *(const LOCAL float4*)at;
      #pragma unroll
      for (int j = 1; j < SLICES; ++j) {
        float4 v = *(const LOCAL float4*)(at + j * ROWS_TILE * PITCH);
        total.x += v.x; total.y += v.y; total.z += v.z; total.w += v.w;
      }
    }
    const int left = n - column - within;
    GLOBAL float* to = c + (row + down) * (LONG)n + column + within;
    if (n % 4 == 0) {
      *(GLOBAL float4*)to = total;
    } else {
      to[0] = total.x;
      if (left > 1) to[1] = total.y;
      if (left > 2) to[2] = total.z;
      if (left > 3) to[3] = total.w;
    }
  }
  if (ranks > 1) CLUSTER_BARRIER;  // until all have read
}
"""


@dataclass(frozen=True)
class Tile:
    """What a block computes, and how.

    Attributes:
        rows, columns: of the block's tile of the result.
        inner: inner elements of a step.
        down, across: rows and columns of a thread's tile.
        slices: of each step's inner elements, a group of threads each.
        stages: steps in shared memory.
        blocks: that are to fit into a multiprocessor, which bounds their registers.
        a_inner, b_inner: whether neighbours along the inner axis are neighbours in memory; else along the other one.
    """

    rows: int
    columns: int
    inner: int
    down: int
    across: int
    slices: int
    stages: int
    blocks: int
    a_inner: bool = True
    b_inner: bool = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """All that is no matter of memory: tiles of equal ones add sums in one order."""
        of_block = self.rows, self.columns, self.inner, self.down, self.across
        return *of_block, self.slices, self.stages, self.blocks

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.rows // self.down * (self.columns // self.across) * self.slices

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: steps of both operands, later partial sums."""
        a = self.rows * (self.inner + _VECTOR * self.a_inner)
        b = self.columns * (self.inner + _VECTOR * self.b_inner)
        return 4 * max(self.stages * (a + b), self.slices * self.rows * (self.columns + _PAD))

    @property
    def name(self) -> str:
        """Of its kernel."""
        letters = "".join("nt"[flag] for flag in (not self.a_inner, self.b_inner))
        return f"product_{'_'.join(map(str, self.numbers))}_{letters}"


def kernel_of(tile: Tile) -> str:
    """The text of a tile's kernel, for behind :data:`CUDA`.

    Its arguments: addresses of ``a``, ``b``, ``c``; ``m``, ``n``, ``k``; numbers from one row, or column, of ``a`` and
    of ``b`` to the next, which are multiples of 4, as the addresses are of 16 bytes. Blocks: the parts of the inner
    axis, which are a cluster; tiles of rows; tiles of columns.
    """
    numbers = {
        "THREADS": tile.threads,
        "MOST_RANKS": MOST_RANKS,
        "BLOCKS": tile.blocks,
        "STAGES": tile.stages,
        "ROWS_TILE": tile.rows,
        "COLUMNS_TILE": tile.columns,
        "INNER": tile.inner,
        "SLICES": tile.slices,
        "ROWS": tile.down,
        "COLUMNS": tile.across,
        "DOWN": tile.rows // tile.down,
        "ACROSS": tile.columns // tile.across,
        "PITCH": tile.columns + _PAD,
        "A_IS_INNER": int(tile.a_inner),
        "B_IS_INNER": int(tile.b_inner),
        "NAME": tile.name,
    }
    for name, size, is_inner in (("A", tile.rows, tile.a_inner), ("B", tile.columns, tile.b_inner)):
        line, lines = (tile.inner, size) if is_inner else (size, tile.inner)
        numbers |= {
            f"{name}_LINES": lines,
            f"{name}_PITCH": line + _VECTOR * is_inner,
            f"{name}_PER_LINE": line // _VECTOR,
            f"{name}_STRIDE": tile.threads * _VECTOR // line,
        }
    return "".join(f"#define {name} {value}\n" for name, value in numbers.items()) + _KERNEL
