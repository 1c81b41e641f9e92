"""Matrix products: ``relax.matmul`` → generated code where the backend's policy says so, torch's ``mm`` elsewhere.

Generated code reads operands through any strides, so heads of an attention are never copied into place, and writes its
result in the order in which it is read next. The policy is a
:class:`~bridge.compile.schedule.products.ProductPolicy`, which the builder carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autodiff.ir import Call, dtype, shape
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import Operand, Product, whole
from bridge.compile.loop_ir.product import Geometry
from bridge.compile.passes.layout import order_of_readers
from bridge.compile.translate.builder import Builder
from bridge.compile.translate.libcalls import emit, tensor
from bridge.compile.translate.registry import register

__all__: list[str] = []


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
    readers = builder.readers.get(builder.variable, ())
    order = order_of_readers(readers, len(extents)) if len(batch) + 2 == len(extents) else None
    if order is None and math.prod(b.shape[:-2]) == 1:
        # Every row of every batch meets the same matrix: one product, if the rows lie so that they are one dimension.
        rows = views.reshape(a.view, (math.prod(a.shape[:-1]), k))
        if rows is not None:
            a, b, batch, m = Operand(a.value, rows), builder.reshape(b, (k, n)), (), rows.shape[0]
    product = None
    if min(m, k, n, *batch) > 0 and builder.products.generated(result, m, n, k):
        product = _generated(builder, a, b, batch, order)
    return builder.reshape(product or _library(builder, a, b, batch), extents)


def _library(builder: Builder, a: Operand, b: Operand, batch: Sequence[int]) -> Operand:
    """2-D products by ``torch.mm``, batches by ``torch.bmm``."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        rows = math.prod(batch) * m
        a, b = builder.reshape(a, (rows, k)), builder.reshape(b, (k, n))
        out = builder.fresh((rows, n), a.dtype)
        emit(builder, "mm", [a, b], [out])
        return whole(out)
    count = math.prod(batch)
    a = builder.reshape(builder.expand(a, (*batch, m, k)), (count, m, k))
    b = builder.reshape(builder.expand(b, (*batch, k, n)), (count, k, n))
    out = builder.fresh((count, m, n), a.dtype)
    emit(builder, "bmm", [a, b], [out])
    return whole(out)


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
    geometry = Geometry.of(a_view, b_view, result)
    if geometry is None:
        return None
    if 1 not in geometry.c[2:]:
        return _generated(builder, a, b, batch, None)
    if geometry.c[3] != 1:  # the product of the transposes writes the transposed result
        a, b, geometry = b, a, geometry.transposed()
    outer, inner, m, n, _ = geometry.extents
    descriptor = geometry.descriptor(builder.products.block(a.dtype, outer * inner, m, n))
    offsets = (geometry.a_offset, geometry.b_offset)
    builder.add(Product((a, b), out, descriptor, offsets, builder.products.function(a.dtype)))
    return Operand(out, result)
