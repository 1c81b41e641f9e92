"""Product policy on CUDA: every matrix product is torch's, by the kernel that eager calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.compile.schedule.products import ProductShape

__all__ = ["CudaProducts"]


@dataclass(frozen=True)
class CudaProducts:
    """cuBLAS by torch, a :class:`~bridge.compile.schedule.products.ProductPolicy`.

    The way follows from the shape alone; what cuBLAS does with it follows from torch's settings, which are part of the
    compile options. cuBLAS reads and writes transposed matrices as fast, whereas a kernel that transposes reads memory
    in steps.
    """

    keeps_order = True
    joins = True
    widened = frozenset({"bfloat16"})
    """Not float16, where GradScaler looks for what does not fit into a gradient of that type."""

    def choose(self, product: ProductShape) -> str:
        """torch's kernel for matrices, or for batches of them."""
        return "mm" if product.batch == 1 else "bmm"

    def made(self) -> tuple[tuple, ...]:
        return ()

    def adopt(self, choices: Sequence[Sequence]) -> bool:
        return not choices

    def block(self, way: str, product: ProductShape) -> tuple[int, int]:
        raise NotImplementedError(f"products on CUDA are torch's: no way {way!r} of our own computes {product}")
