"""Matrix products: generated code (:mod:`bridge.compile.cpu.gemm`) where it is the fastest here, torch's elsewhere.

torch multiplies float32 and float64 with Intel's MKL, which leaves processors of other makers with code for narrower
vectors: on an AVX-512 EPYC generated code is twice as fast. It reads operands through any strides, so heads of an
attention are never copied into place, and writes its result in the order in which it is read next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from tvm.tirx import PrimFunc

from autodiff.ir import Call, dtype, op_name, shape
from bridge.compile.cpu.gemm import FIELDS, ROWS, WIDEST_BLOCK, columns, gemm_function
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Operand, Product, whole
from bridge.compile.loop_ir.views import View
from bridge.compile.runtime.build import host_cpu
from bridge.compile.translate.builder import Builder, register
from bridge.compile.translate.libcalls import emit, tensor

__all__ = ["generated"]

_SMALL = 2**15
"""Multiplications below which a product is torch's: little to gain, and the first of ours costs a compilation."""

_WASTE = 2
"""How many times its own elements a product may compute, padded to whole register tiles, before torch's is better."""

_TALLEST_BLOCK = 96 * ROWS
"""Rows of one task at most: each task packs its part of ``b``, which is worth the more, the more rows read it."""

_GENERATED_CPUS = ("znver4", "znver5")
"""LLVM's names of processors with AVX-512 on which MKL does not use it."""


def generated(element_type: str, m: int, n: int, k: int) -> bool:
    """Whether a product of ``[m, k]`` and ``[k, n]`` matrices is generated code."""
    if element_type not in ("float32", "float64") or m * n * k < _SMALL or host_cpu() not in _GENERATED_CPUS:
        return False
    width = columns(element_type)
    return -(-n // width) * width * -(-m // 4) * 4 <= _WASTE * m * n


@register("relax.matmul")
def _matmul(builder: Builder, call: Call) -> Operand:
    """``NotImplemented`` for types torch has no product of."""
    result = dtype(call)
    if result == "bool" or result.startswith("uint"):
        return NotImplemented
    a, b = (builder.cast(tensor(builder, arg), result) for arg in call.args)
    extents = shape(call)
    if len(a.shape) == 1:
        a = builder.reshape(a, (1, *a.shape))
    if len(b.shape) == 1:
        b = builder.reshape(b, (*b.shape, 1))
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    order = _order_of_readers(builder, (*batch, m, n)) if len(batch) + 2 == len(extents) else None
    if order is None and math.prod(b.shape[:-2]) == 1:
        # Every row of every batch meets the same matrix: one product, if the rows lie so that they are one dimension.
        rows = views.reshape(a.view, (math.prod(a.shape[:-1]), k))
        if rows is not None:
            a, b, batch, m = Operand(a.value, rows), builder.reshape(b, (k, n)), (), rows.shape[0]
    product = None
    if min(m, k, n, *batch) > 0 and generated(result, m, n, k):
        product = _generated(builder, a, b, batch, order)
    return builder.reshape(product or _library(builder, a, b, batch), extents)


def _library(builder: Builder, a: Operand, b: Operand, batch: Sequence[int]) -> Operand:
    """2-D products by ``torch.mm``, batches by ``torch.bmm``."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        rows = math.prod(batch) * m
        a, b = builder.reshape(a, (rows, k)), builder.reshape(b, (k, n))
        out = builder.fresh((rows, n), a.dtype)
        emit(builder, "mm", [a, b], [out], lambda outs, args: torch.mm(args[0], args[1], out=outs[0]))
        return whole(out)
    count = math.prod(batch)
    a = builder.reshape(builder.expand(a, (*batch, m, k)), (count, m, k))
    b = builder.reshape(builder.expand(b, (*batch, k, n)), (count, k, n))
    out = builder.fresh((count, m, n), a.dtype)
    emit(builder, "bmm", [a, b], [out], lambda outs, args: torch.bmm(args[0], args[1], out=outs[0]))
    return whole(out)


def _order_of_readers(builder: Builder, extents: Sequence[int]) -> list[int] | None:
    """The order of dimensions that all readers of the product being translated permute it to; ``None``: its own."""
    orders = set()
    for reader in builder.readers.get(builder.variable, ()):
        if op_name(reader) != "relax.permute_dims" or reader.attrs.axes is None:
            return None
        orders.add(tuple(int(axis) % len(extents) for axis in reader.attrs.axes))
    if len(orders) != 1:
        return None
    (order,) = orders
    return None if list(order) == sorted(order) else list(order)


def _generated(
    builder: Builder, a: Operand, b: Operand, batch: Sequence[int], order: Sequence[int] | None
) -> Operand | None:
    """``a @ b``, stored in ``order``; ``None`` where the batch has more dimensions than the kernel."""
    rank = len(batch) + 2
    order = list(range(rank)) if order is None else list(order)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    extents = (*batch, m, n)
    out = builder.fresh([extents[axis] for axis in order], a.dtype)
    inverse = [order.index(axis) for axis in range(rank)]
    result = views.permute(views.dense(out.shape), inverse)
    a_view, b_view = views.expand(a.view, (*batch, m, k)), views.expand(b.view, (*batch, k, n))
    geometry = _Geometry.of(a_view, b_view, result)
    if geometry is None:
        return None
    if 1 not in geometry.c[2:]:
        return _generated(builder, a, b, batch, None)
    if geometry.c[3] != 1:  # the product of the transposes writes the transposed result
        a, b, geometry = b, a, geometry.transposed()
    offsets = (geometry.a_offset, geometry.b_offset)
    builder.add(Product((a, b), out, geometry.descriptor(a.dtype), offsets, _function(a.dtype)))
    return Operand(out, result)


class _Geometry:
    """Extents ``(outer, inner, m, n, k)`` and, of each operand, strides ``(outer, inner, row, column)``."""

    def __init__(self, extents, a, b, c, a_offset, b_offset) -> None:
        self.extents, self.a, self.b, self.c = extents, a, b, c
        self.a_offset, self.b_offset = a_offset, b_offset

    @classmethod
    def of(cls, a: View, b: View, c: View) -> _Geometry | None:
        batch: list[list[int]] = []  # extent and the three strides, neighbours that run through merged
        for extent, *steps in zip(c.shape[:-2], a.strides, b.strides, c.strides, strict=False):
            if extent == 1:
                continue
            if batch and batch[-1][1:] == [step * extent for step in steps]:
                batch[-1] = [batch[-1][0] * extent, *steps]
            else:
                batch.append([extent, *steps])
        if len(batch) > 2:
            return None
        outer, inner = ([[1, 0, 0, 0]] * 2 + batch)[-2:]
        extents = (outer[0], inner[0], *c.shape[-2:], a.shape[-1])
        strides = [(outer[i], inner[i], *view.strides[-2:]) for i, view in enumerate((a, b, c), start=1)]
        # A dimension of extent 1 has no stride to speak of; 1 is the one that is read in vectors.
        strides = [
            (*step[:2], *_unit(view.shape[-2:], step[2:])) for step, view in zip(strides, (a, b, c), strict=True)
        ]
        return cls(extents, *strides, a.offset, b.offset)

    def transposed(self) -> _Geometry:
        outer, inner, m, n, k = self.extents
        a, b, c = ((*strides[:2], strides[3], strides[2]) for strides in (self.a, self.b, self.c))
        return _Geometry((outer, inner, n, m, k), b, a, c, self.b_offset, self.a_offset)

    def descriptor(self, element_type: str) -> tuple[int, ...]:
        """Values of :data:`bridge.compile.cpu.gemm.FIELDS`."""
        outer, inner, m, n, _ = self.extents
        rows, width = _blocks(outer * inner, m, n, columns(element_type))
        fields = (*self.extents, *self.a, *self.b, *self.c[:3], rows, width, 0)
        assert len(fields) == len(FIELDS)
        return fields


def _unit(extents: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if extent == 1 else stride for extent, stride in zip(extents, strides, strict=True))


def _blocks(batch: int, m: int, n: int, panel: int) -> tuple[int, int]:
    """Rows and columns of one task: tall blocks, because each packs its part of ``b``, and tasks for every thread."""
    parts = -(-m // _TALLEST_BLOCK)
    rows = -(-m // (parts * ROWS)) * ROWS
    wanted = 2 * torch.get_num_threads()
    panels = min(WIDEST_BLOCK, -(-n // panel))
    while panels > 1 and batch * -(-m // rows) * -(-n // (panels * panel)) < wanted:
        panels -= 1
    return rows, panels * panel


@functools.cache
def _function(element_type: str) -> PrimFunc:
    return gemm_function(element_type)
