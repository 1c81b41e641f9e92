"""Product policy on CUDA: every matrix product is torch's, by the kernel that eager calls.

Launch of torch's fused dropout on a GPU: number of elements → threads, numbers per thread, the generator's advance.
Eager's mask depends on them: thread t of the launch draws from subsequence t of the generator's seed, four numbers per
call, and every launch advances the generator's offset by the maximum number that a thread takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autodiff.extents import Dim, Extent, minimum
from bridge.compile.schedule.products import ProductPolicy, ProductShape

__all__ = ["BLOCK", "NUMBERS", "CudaProducts", "Gpu", "gpu_of"]

_FEW = 32, 64
"""Rows of a product, a recurrent cell's batch, between which cuBLASLt has the faster kernels."""

_NARROW, _MISJUDGED = 128, 2**18
"""Columns, and elements, of a matrix for which cuBLAS takes 25 to 53 us and cuBLASLt 2 to 10 us for a product of 8 or
16 rows (float32, H200, CUDA 13): with 128 columns; with more, if columns are dense."""

_UNITS = {"bfloat16": 8, "float16": 8, "float32": 4}
"""Numbers in 16 bytes. Products of 2048 misaligned rows by 1001 x 2048 take 4 to 5.6 times as long in half types, 1.9
to 2.7 times in TF32; of 16384 by 30522 x 768, 2.4 to 3 and 1.9 to 2.6 times (H200)."""

_LARGE, _NARROWEST = 2**31, 512
"""Multiplications, and extents, from which on padding copies take less time than they save."""


@dataclass(frozen=True)
class CudaProducts(ProductPolicy):
    """cuBLAS by torch.

    The algorithm follows from the shape, and from torch's settings, which are part of the compile options. cuBLASLt,
    which eager's linear layers also call, computes products of few rows: in TF32 with a transposed weight, otherwise
    with a small matrix. cuBLAS handles transposed matrices at full speed, whereas a transposing kernel is strided.

    Attributes:
        tf32: whether float32 products may be rounded to TF32.
    """

    tf32: bool = False

    keeps_order = True

    @property
    def turns(self) -> bool:
        return self.tf32

    def choose(self, product: ProductShape) -> str:
        """torch's kernel for matrices, or for batches of them."""
        if self._is_by_lt(product):
            return "mm_lt"
        return "mm" if product.batch == 1 else "bmm"

    def _is_by_lt(self, product: ProductShape) -> bool:
        extents = product.batch, product.m, product.n, product.k
        if product.element_type != "float32" or product.a.unit != "row" or any(isinstance(x, Extent) for x in extents):
            return False
        batch, m, n, k = extents
        if self.tf32:
            return batch == 1 and _FEW[0] <= m <= _FEW[1] and n > 1 and product.b.unit == "column"
        is_misjudged = n == _NARROW or (n > _NARROW and product.b.unit == "column")
        return batch == 1 and 1 < m < _FEW[0] and n * k <= _MISJUDGED and is_misjudged

    def unit(self, product: ProductShape) -> int:
        """16 bytes' elements, if tensor cores compute the product and it is worth copies of its operands."""
        if product.element_type not in _UNITS or (product.element_type == "float32" and not self.tf32):
            return 1
        is_large = product.multiplications >= _LARGE and min(product.m, product.n, product.k) >= _NARROWEST
        return _UNITS[product.element_type] if is_large else 1

    def block(self, way: str, product: ProductShape) -> tuple[int, int]:
        raise NotImplementedError(f"products on CUDA are torch's: no way {way!r} of our own computes {product}")


BLOCK = 256
"""Threads of a block."""
NUMBERS = 4
"""Numbers of one call of the generator."""


@dataclass(frozen=True)
class Gpu:
    """The size of a GPU, as far as a launch depends on it.

    Attributes:
        processors: its multiprocessors.
        threads: maximum threads of a multiprocessor.
    """

    processors: int
    threads: int

    @property
    def most_threads(self) -> int:
        """Threads of the largest launch."""
        return self.processors * (self.threads // BLOCK) * BLOCK

    def launched(self, count: Dim) -> Dim:
        """Threads of the launch for ``count`` elements, at least one."""
        return minimum(self.most_threads, (count + BLOCK - 1) // BLOCK * BLOCK)

    def advance(self, count: int) -> int:
        """Eager's increment of the generator's offset for ``count`` elements."""
        return ((count - 1) // (self.launched(count) * NUMBERS) + 1) * NUMBERS


def gpu_of(device: torch.device) -> Gpu:
    """A CUDA device's size."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, found.max_threads_per_multi_processor)
