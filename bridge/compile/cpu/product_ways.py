"""Ways to compute a matrix product on the CPU: by name, and as functions over memory of their own for measuring.

Every way gives the product to rounding; they differ in the order of additions. Library ways are the kernels of
:mod:`bridge.library.products`, called as a program calls them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bridge.base.mkl import can_pack, packed
from bridge.base.torch_internals import bfloat16_in_onednn, linear_pointwise
from bridge.compile.loop_ir.operations import Geometry, Packing, ProductPlan
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.products import PACKED, LayoutClass, ProductShape
from bridge.library import OUT_KERNELS

__all__ = ["Multiply", "ProductTrial", "library_ways"]

Multiply = Callable[..., None]
"""``(address of a, of b, of c, of the descriptor)``: a built kernel of :mod:`bridge.compile.cpu.gemm`."""

_SKINNY = 64
"""Rows or columns of a result up to which the transposed one is tried: it has to be copied into place."""


def library_ways(product: ProductShape) -> list[str]:
    """Names of the library kernels that may compute the product; torch's own first."""
    if product.batch > 1:
        return ["bmm"]
    ways = ["mm"]
    # The others want the rows of a and the columns of b dense, as activations and weights are.
    if (product.a.unit, product.b.unit) != ("row", "column"):
        return ways
    if min(product.m, product.n) <= _SKINNY:
        ways.append("mm_swapped")
    has_type = product.element_type == "float32" or (product.element_type == "bfloat16" and bfloat16_in_onednn())
    if linear_pointwise is not None and has_type:
        ways.append("linear")
    if product.b.constant and product.element_type == "float32" and can_pack():
        ways.append(PACKED)
    return ways


@dataclass(frozen=True)
class ProductTrial:
    """Memory of one product, ``c = a @ b``, that every way can be run on.

    Attributes:
        a, b, c: ``[batch, rows, columns]``; ``c`` is dense, the others have any strides.
        copied: which of ``a`` and ``b`` a library's kernel is given a dense copy of, made at each call.
    """

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    copied: tuple[bool, bool] = (False, False)

    @classmethod
    def of(cls, product: ProductShape) -> ProductTrial:
        """Memory of a product's shape and layouts, filled with ones: no way's speed depends on the numbers."""
        dtype = getattr(torch, product.element_type)
        a = _operand(product.batch, product.m, product.k, product.a, dtype)
        b = _operand(product.batch, product.k, product.n, product.b, dtype)
        c = torch.zeros(product.batch, product.m, product.n, dtype=dtype)
        return cls(a, b, c, (product.a.copied, product.b.copied))

    @property
    def shape(self) -> ProductShape:
        """The product's shape; operands that a library takes as they lie are no copies."""
        batch, m, n = self.c.shape
        a, b = (LayoutClass(_unit(x), copied) for x, copied in zip((self.a, self.b), self.copied, strict=True))
        return ProductShape(str(self.c.dtype).removeprefix("torch."), batch, m, n, self.a.shape[2], a, b)

    def library(self, way: str) -> Callable[[], None]:
        """A function that computes ``c`` by a library's kernel, with the copies that it needs."""
        kernel, tensors = OUT_KERNELS[way], [self.a, self.b, self.c]
        a, b, c = tensors if way == "bmm" else [tensor[0] for tensor in tensors]
        if way == PACKED:
            return partial(kernel, [c], [a, packed(b, len(a))], len(a))
        if not any(self.copied):
            return partial(kernel, [c], [a, b])
        sources = [a, b]
        dense = [torch.empty(x.shape, dtype=x.dtype) if y else x for x, y in zip(sources, self.copied, strict=True)]

        def with_copies() -> None:
            for target, source in zip(dense, sources, strict=True):
                if target is not source:
                    target.copy_(source)
            kernel([c], dense)

        return with_copies

    def plan(self, way: str, block: tuple[int, int], packing: Packing | None = None) -> ProductPlan:
        """What the kernel is told, for tasks of ``block`` rows and columns."""
        geometry = Geometry.of(*(View(tuple(x.shape), x.stride()) for x in (self.a, self.b, self.c)))
        assert geometry is not None
        return ProductPlan(way, self.shape.element_type, geometry, block, packing)

    def generated(self, multiply: Multiply, plan: ProductPlan) -> Callable[[], None]:
        """A function that computes ``c`` by the built kernel."""
        return self._launch(multiply, plan, self.a, self.b, self.c)

    def packed(self, pack: Multiply, multiply: Multiply, plan: ProductPlan) -> Callable[[], None]:
        """The same, of panels that are packed now."""
        assert plan.packing is not None
        panels = torch.zeros(plan.packing.elements, dtype=self.b.dtype)
        self._launch(pack, plan, self.b, panels)()
        return self._launch(multiply, plan, self.a, panels, self.c)

    def _launch(self, kernel: Multiply, plan: ProductPlan, *tensors: torch.Tensor) -> Callable[[], None]:
        descriptor = torch.tensor(plan.descriptor(), dtype=torch.int64)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, descriptor)]

        def run(_alive: object = (self, tensors, descriptor)) -> None:
            kernel(*addresses)

        return run


def _unit(matrices: torch.Tensor) -> str:
    return "row" if matrices.stride(2) == 1 else "column" if matrices.stride(1) == 1 else "none"


def _operand(batch: int, rows: int, columns: int, layout: LayoutClass, dtype: torch.dtype) -> torch.Tensor:
    """``[batch, rows, columns]`` of ones, laid out as the class says; what is copied lies as heads of an attention."""
    if layout.unit == "none":
        return torch.ones(batch, rows, 2 * columns, dtype=dtype)[:, :, ::2]
    if layout.unit == "column":
        return _operand(batch, columns, rows, LayoutClass("row", layout.copied), dtype).mT
    if layout.copied:
        return torch.ones(rows, batch, columns, dtype=dtype).transpose(0, 1)
    return torch.ones(batch, rows, columns, dtype=dtype)
