"""Matrix products: ``relax.matmul`` → the way that the backend's policy chooses: generated code or a library kernel.

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
from bridge.compile.schedule.products import LayoutClass, ProductShape, is_generated
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
    readers = builder.readers.get(builder.variable, ())
    order = order_of_readers(readers, len(extents)) if len(batch) + 2 == len(extents) else None
    # What is asked of the policy depends neither on this order nor on that of the operands: readers decide those.
    product = _product_shape(result, _usual_view(builder, a), _usual_view(builder, b), batch)
    way = builder.products.choose(product) if product.multiplications else "mm"
    rows = _rows(a.view, b.view)
    if rows is not None and (order is None or not is_generated(way)):
        a, b, batch, order = Operand(a.value, rows), builder.reshape(b, b.shape[-2:]), (), None
    made = _generated(builder, way, a, b, batch, order) if is_generated(way) else None
    return builder.reshape(made or _library(builder, way, a, b, batch), extents)


def _rows(a: views.View, b: views.View) -> views.View | None:
    """All rows of ``a`` as one dimension, where every one meets the same ``b`` and that needs no copy."""
    return views.reshape(a, (math.prod(a.shape[:-1]), a.shape[-1])) if math.prod(b.shape[:-2]) == 1 else None


def _usual_view(builder: Builder, operand: Operand) -> views.View:
    """The operand's view if its value were stored in its own order, whoever reads it."""
    if operand.value not in builder.reordered:
        return operand.view
    # Where no strides express it, it would have been copied.
    return views.compose(operand.view, builder.reordered[operand.value]) or views.dense(operand.shape)


def _product_shape(element_type: str, a: views.View, b: views.View, batch: Sequence[int]) -> ProductShape:
    """What decides how a product is computed; ``batch``: extents that both operands' batches broadcast to."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    count = math.prod(batch)
    if math.prod(b.shape[:-2]) == 1:
        rows = _rows(a, b)
        a_layout = _layout(a if rows is None else rows, rows is None)
        return ProductShape(element_type, 1, count * m, n, k, a_layout, _layout(b, False))
    layouts = []
    for view in (a, b):
        flat = views.reshape(views.expand(view, (*batch, *view.shape[-2:])), (count, *view.shape[-2:]))
        layouts.append(_layout(view, flat is None))
    return ProductShape(element_type, count, m, n, k, *layouts)


def _layout(view: views.View, is_copied: bool) -> LayoutClass:
    """The class of a matrix or a batch of them; a dimension of extent 1 has no stride to speak of."""
    strides = [1 if extent == 1 else stride for extent, stride in zip(view.shape[-2:], view.strides[-2:], strict=True)]
    unit = "row" if strides[1] == 1 else "column" if strides[0] == 1 else "none"
    return LayoutClass(unit, is_copied)


def _library(builder: Builder, way: str, a: Operand, b: Operand, batch: Sequence[int]) -> Operand:
    """2-D products by the kernel that ``way`` names, by ``torch.mm`` if it names none; batches by ``torch.bmm``."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        rows = math.prod(batch) * m
        a, b = builder.reshape(a, (rows, k)), builder.reshape(b, (k, n))
        out = builder.fresh((rows, n), a.dtype)
        emit(builder, "mm" if is_generated(way) else way, [a, b], [out])
        return whole(out)
    count = math.prod(batch)
    a = builder.reshape(builder.expand(a, (*batch, m, k)), (count, m, k))
    b = builder.reshape(builder.expand(b, (*batch, k, n)), (count, k, n))
    out = builder.fresh((count, m, n), a.dtype)
    emit(builder, "bmm", [a, b], [out])
    return whole(out)


def _generated(
    builder: Builder, way: str, a: Operand, b: Operand, batch: Sequence[int], order: Sequence[int] | None
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
        return _generated(builder, way, a, b, batch, None)
    if geometry.c[3] != 1:  # the product of the transposes writes the transposed result
        a, b, geometry = b, a, geometry.transposed()
    outer, inner, m, n, k = geometry.extents
    product = ProductShape(a.dtype, outer * inner, m, n, k)
    descriptor = geometry.descriptor(builder.products.block(way, product))
    offsets = (geometry.a_offset, geometry.b_offset)
    if order != sorted(order):
        builder.reordered[out] = views.permute(views.dense(extents), order)
    builder.add(Product((a, b), out, descriptor, offsets, builder.products.function(a.dtype)))
    return Operand(out, result)
