"""Product choice: a layout-agnostic matrix product → the policy's algorithm: generated code or a library call.

Generated code reads operands with any strides, so attention's heads are never copied, and writes its result in the
order to which all its consumers permute it. The policy is a
:class:`~bridge.compile.schedule.products.ProductPolicy`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autodiff.extents import Dim, same, sample_of
from autodiff.ir import inverse
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import (
    LayoutAgnostic,
    LibraryCall,
    MatMul,
    Node,
    Operand,
    Product,
    Shaped,
    Value,
    whole,
)
from bridge.compile.loop_ir.operations import Geometry, ProductPlan
from bridge.compile.loop_ir.views import View
from bridge.compile.passes.sections import Placed
from bridge.compile.schedule.products import (
    GENERATED,
    LayoutClass,
    ProductPolicy,
    ProductShape,
    is_generated,
    is_in_panels,
)

__all__ = ["ProductChoice", "order_of_readers"]

Given = tuple[Operand, View]
"""An operand, and its view if every product were stored row-major (its usual view)."""


class ProductChoice:
    """Chooses algorithms of products one by one, in execution order.

    Attributes:
        policy: the backend's.
        readers: the consumers of each value of the layout-agnostic graph.
        constants: values that are the same at each call.
        lasting: parameters that are the same in every step, for a loop's body.
    """

    def __init__(
        self,
        policy: ProductPolicy,
        readers: Mapping[Value, Sequence[Node | LayoutAgnostic]],
        constants: Collection[Value] = (),
        lasting: Collection[Value] = (),
    ) -> None:
        self.policy = policy
        self.readers = readers
        self.constants = constants
        self.lasting = lasting if policy.packs else ()

    def choose(
        self,
        placed: Placed,
        node: MatMul,
        a: Given,
        b: Given,
        bias: Operand | None = None,
        *,
        is_gradient: bool = False,
    ) -> Operand:
        """Adds the nodes that compute a product of placed operands; returns the result's place.

        Each operand comes with its usual view: the algorithm, which decides bits, must not depend on stored layouts,
        which consumers decide. Only a gradient's bits may depend on layouts: no other function computes it again.
        """
        if bias is not None:
            return _with_bias(placed, a[0], b[0], placed.dense(bias))
        (a, usual_a), (b, usual_b) = (_matrices(placed, *each) for each in ((a, (1, -1)), (b, (-1, 1))))
        extents = node.out.shape
        batch = views.broadcast(a.shape[:-2], b.shape[:-2])
        constant, lasting = b.value in self.constants and _is_whole(b), b.value in self.lasting
        way = self._way(a.dtype, usual_a, usual_b, batch, constant, lasting)
        order = order_of_readers(self.readers.get(node.out, ())) if len(batch) + 2 == len(extents) else None
        rows = _rows(a.view, b.view)
        if rows is not None and (order is None or not is_generated(way)):
            a, b, batch, order = Operand(a.value, rows), placed.reshape(b, b.shape[-2:]), (), None
        if is_generated(way):
            made = self._generated(placed, way, a, b, batch, order)
        else:
            made = self._by_library(placed, way, a, b, batch, order if is_gradient else None)
        return placed.reshape(made, extents)

    def _by_library(
        self, placed: Placed, way: str, a: Operand, b: Operand, batch: Sequence[Dim], order: Sequence[int] | None
    ) -> Operand:
        """``a @ b``; transposed (``b.T @ a.T``) if the consumers want that layout and it costs nothing."""
        turn = self.policy.keeps_order and order is not None and order.index(len(order) - 1) < len(order) - 1
        if not turn or same(math.prod(b.shape[:-2]), 1):
            return _library(placed, way, a, b, batch, self.policy.keeps_order)
        first, second = _turned(b), _turned(a)
        way = self._way(a.dtype, first.view, second.view, batch)  # a matrix that the batch shares is now a
        turned = _library(placed, way, first, second, batch, True)
        return _turned(placed.reshape(turned, (*batch, b.shape[-1], a.shape[-2])))

    def _way(
        self, element_type: str, a: View, b: View, batch: Sequence[Dim], constant: bool = False, lasting: bool = False
    ) -> str:
        product = product_shape(element_type, a, b, batch)
        if constant and product.batch == 1 and all(isinstance(extent, int) for extent in a.shape):
            product = replace(product, b=replace(product.b, constant=True))
        if lasting and all(isinstance(extent, int) for extent in (*a.shape, *b.shape, *batch)):
            product = replace(product, b=replace(product.b, lasting=True))
        way = self.policy.choose(product) if product.multiplications else "mm"
        if is_generated(way) and _rows(a, b) is None and _geometry(a, b, batch, None) is None:
            return "mm"  # more batch extents than the kernel has loops for
        return way

    def _generated(
        self, placed: Placed, way: str, a: Operand, b: Operand, batch: Sequence[Dim], order: Sequence[int] | None
    ) -> Operand:
        """``a @ b``, stored in ``order`` if the kernel supports it."""
        geometry = _geometry(a.view, b.view, batch, order)
        row, column = (0, 1) if geometry is None else geometry.c[2:]
        if order is not None and (geometry is None or not (same(row, 1) or same(column, 1))):
            return self._generated(placed, way, a, b, batch, None)
        if geometry is None:  # because of an operand's stored layout, or without proof for all sizes
            dense = placed.dense(a), placed.dense(b)
            if dense == (a, b):
                return _library(placed, "mm", a, b, batch)
            return self._generated(placed, way, *dense, batch, None)
        stored, result = _stored((*batch, a.shape[-2], b.shape[-1]), order)
        if not same(column, 1):  # the product of the transposes writes the transposed result
            a, b, geometry = b, a, geometry.transposed()
        is_constant = b.value in self.constants
        if is_in_panels(way) and not (is_constant or b.value in self.lasting):
            way = GENERATED  # b is the other operand or a copy, neither of them constant
        out = placed.fresh(stored.shape, a.dtype)
        placed.nodes.append(Product((a, b), out, self._plan(way, a.dtype, geometry, is_constant)))
        return Operand(out, result)

    def _plan(self, way: str, element_type: str, geometry: Geometry, is_constant: bool) -> ProductPlan:
        outer, inner, m, n, k = geometry.extents
        product = ProductShape(element_type, outer * inner, m, n, k)
        block, packing = self.policy.block(way, product), self.policy.packing(way, product)
        if packing is not None:
            packing = replace(packing, bound=is_constant)
        return ProductPlan(way, element_type, geometry, block, packing)


def _matrices(placed: Placed, given: Given, vector: tuple[int, int]) -> Given:
    """The operand and its usual view; a vector becomes a matrix of one row or column."""
    operand, usual = given
    if len(operand.shape) > 1:
        return given
    extents = tuple(operand.shape[0] if extent < 0 else extent for extent in vector)
    return placed.reshape(operand, extents), views.reshape(usual, extents)


def _stored(extents: Sequence[Dim], order: Sequence[int] | None) -> tuple[View, View]:
    """The dense view of a stored result, and the view of it in the result's own axis order."""
    if order is None:
        return views.dense(extents), views.dense(extents)
    stored = views.dense([extents[axis] for axis in order])
    return stored, views.permute(stored, inverse(order))


def _geometry(a: View, b: View, batch: Sequence[Dim], order: Sequence[int] | None) -> Geometry | None:
    """The geometry of a generated product; ``None`` if the batch has more dimensions than the kernel."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    _, result = _stored((*batch, m, n), order)
    return Geometry.of(views.expand(a, (*batch, m, k)), views.expand(b, (*batch, k, n)), result)


def order_of_readers(readers: Iterable[Node | LayoutAgnostic]) -> list[int] | None:
    """The axis order to which all consumers permute a tensor, or ``None`` for its own order.

    Consumers read a tensor stored in that order without a copy. The order changes no value.
    """
    orders = set()
    for reader in readers:
        if not isinstance(reader, Shaped) or reader.function is not views.permute:
            return None
        orders.add(reader.arguments)
    if len(orders) != 1:
        return None
    ((order,),) = orders
    return None if order is None or list(order) == sorted(order) else list(order)


def product_shape(element_type: str, a: View, b: View, batch: Sequence[Dim]) -> ProductShape:
    """The class of a product, at the sample's sizes; ``batch``: the broadcast batch extents of both operands."""
    m, k, n = (sample_of(extent) for extent in (a.shape[-2], a.shape[-1], b.shape[-1]))
    count = math.prod(batch)
    number = sample_of(count)
    if same(math.prod(b.shape[:-2]), 1):
        rows = _rows(a, b)
        a_layout = _layout(a if rows is None else rows, rows is None)
        return ProductShape(element_type, 1, number * m, n, k, a_layout, _layout(b, False))
    layouts = []
    for view in (a, b):
        flat = views.reshape(views.expand(view, (*batch, *view.shape[-2:])), (count, *view.shape[-2:]))
        layouts.append(_layout(view, flat is None))
    return ProductShape(element_type, number, m, n, k, *layouts)


def _is_whole(operand: Operand) -> bool:
    """Whether an operand is a whole dense matrix, or its transpose."""
    shape = operand.shape
    if len(shape) != 2 or math.prod(shape) != math.prod(operand.value.shape):
        return False
    return operand.view in (views.dense(shape), views.permute(views.dense(shape[::-1]), (1, 0)))


def _rows(a: View, b: View) -> View | None:
    """All rows of ``a`` as one dimension if they share one ``b`` and no copy is needed; else ``None``."""
    rows = (math.prod(a.shape[:-1]), a.shape[-1])
    return views.reshape(a, rows) if same(math.prod(b.shape[:-2]), 1) else None


def _layout(view: View, is_copied: bool) -> LayoutClass:
    """The layout class of a matrix or a batch of matrices; the stride of an extent of 1 is arbitrary."""
    units = [
        same(extent, 1) or same(stride, 1) for extent, stride in zip(view.shape[-2:], view.strides[-2:], strict=True)
    ]
    unit = "row" if units[1] else "column" if units[0] else "none"
    return LayoutClass(unit, is_copied)


def _turned(operand: Operand) -> Operand:
    """The operand with its matrices transposed."""
    axes = [*range(len(operand.shape) - 2), -1, -2]
    return Operand(operand.value, views.permute(operand.view, axes))


def _batches(placed: Placed, operand: Operand, batch: Sequence[Dim], keeps_order: bool) -> Operand:
    """The operand as one batch of matrices; a necessary copy keeps column-major memory if ``keeps_order``."""
    matrix = operand.shape[-2:]
    expanded = placed.expand(operand, (*batch, *matrix))
    shape = (math.prod(batch), *matrix)
    if keeps_order and views.reshape(expanded.view, shape) is None and _layout(operand.view, True).unit == "column":
        return _turned(_batches(placed, _turned(operand), batch, False))
    return placed.reshape(expanded, shape)


def _library(
    placed: Placed, way: str, a: Operand, b: Operand, batch: Sequence[Dim], keeps_order: bool = False
) -> Operand:
    """2-D products by the kernel that ``way`` names; batches by ``torch.bmm``.

    ``keeps_order``: see :class:`~bridge.compile.schedule.products.ProductPolicy`.
    """
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    count = math.prod(batch)
    if same(math.prod(b.shape[:-2]), 1):
        a, b = placed.reshape(a, (count * m, k)), placed.reshape(b, (k, n))
        out = placed.fresh((count * m, n), a.dtype)
    else:
        a, b = (_batches(placed, operand, batch, keeps_order) for operand in (a, b))
        way, out = "bmm", placed.fresh((count, m, n), a.dtype)
    placed.nodes.append(LibraryCall(way, (a, b), (out,)))
    return whole(out)


def _with_bias(placed: Placed, a: Operand, b: Operand, bias: Operand) -> Operand:
    """A product with a bias, by the library; a backend that generates products never gets one."""
    out = placed.fresh((a.shape[0], b.shape[1]), a.dtype)
    placed.nodes.append(LibraryCall("mm_biased", (bias, a, b), (out,)))
    return whole(out)
