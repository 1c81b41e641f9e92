"""Product policy: what a backend decides about matrix products; translation asks it, the backend implements it."""

from __future__ import annotations

from typing import Protocol

from tvm.tirx import PrimFunc

__all__ = ["ProductPolicy"]


class ProductPolicy(Protocol):
    """A backend's choices for ``[m, k] @ [k, n]`` products of one element type."""

    def generated(self, element_type: str, m: int, n: int, k: int) -> bool:
        """Whether generated code computes it; torch's library does otherwise."""

    def block(self, element_type: str, batch: int, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of the result that one task computes."""

    def function(self, element_type: str) -> PrimFunc:
        """The kernel, which reads extents, strides and block from :data:`bridge.compile.loop_ir.product.FIELDS`."""
