"""Loop IR: a graph of nodes over strided views, between a Relax function and its kernels.

Five kinds of node, each with *dense* results:

* :class:`Pointwise` — element ``i`` of the result from elements of the operands' views at ``i``;
* :class:`Reduction` — over the middle of ``(outer, reduced, inner)``: a row reduction if ``inner == 1``, a column
  reduction otherwise;
* :class:`LibraryCall` — torch computes it (:mod:`bridge.library`); a :class:`LoopCall`, a program of its own;
* :class:`Product` — a matrix product in generated code (:mod:`bridge.compile.loop_ir.operations`);
* :class:`KernelCall` — a kernel of the backend's own.

A shape operation is no node, but the :class:`~bridge.compile.loop_ir.views.View` of an :class:`Operand`.

Layout-agnostic graph: translation's output, before :mod:`bridge.compile.passes.choose_layouts`. It fixes values but no
memory layout: every operand reads all of a value, perhaps broadcast, and shape operations, matrix products and
concatenations are nodes with dense results. Choosing layouts turns shape operations into views, products into library
calls or generated code, and leaves none of these nodes.

Dead code elimination: a graph → its nodes that the results need.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import tvm

from autodiff.extents import Dim, Extent, same
from autodiff.ir import itemsize
from autodiff.scan import Scan
from bridge.compile.loop_ir.operations import ProductPlan
from bridge.compile.loop_ir.views import View, dense, is_dense, permute

__all__ = ["Concat", "Dense", "Graph", "Join", "KernelCall", "LayoutAgnostic", "LibraryCall", "LoopCall", "MatMul"]
__all__ += ["Node", "OneOperand", "OneOut", "Operand", "Pad", "Pointwise", "Positions", "Product", "Reduction"]
__all__ += ["Result", "Scalar", "Shaped", "Value", "eliminate_dead_code", "is_turned", "readers_of", "whole"]


@dataclass(frozen=True, eq=False)
class Value:
    """A dense tensor: a parameter, a constant, or a node's result. Identity is the object's.

    An ``"index"`` has no memory: each element is its own position in the tensor, which a kernel knows.

    Attributes:
        order: a parameter is ``permute(order)`` of the caller's tensor; ``None``: the tensor itself.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    source: str = "node"  # or "param", "constant", "index"
    order: tuple[int, ...] | None = None

    @property
    def numel(self) -> Dim:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> Dim:
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class Operand:
    """A value, read through a view."""

    value: Value
    view: View

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.view.shape

    @property
    def dtype(self) -> str:
        return self.value.dtype

    @property
    def is_whole(self) -> bool:
        """Whether the view reads all elements of the value in memory order."""
        return same(self.view.numel, self.value.numel) and is_dense(self.view)


@dataclass(frozen=True)
class Scalar:
    """A number broadcast to ``shape``, known at compile time or (an extent) when a program is bound."""

    number: float | int | bool | Extent
    dtype: str
    shape: tuple[Dim, ...] = ()


class OneOperand:
    """A node that reads one ``operand``."""

    operand: Operand | Scalar

    @property
    def operands(self) -> tuple[Operand | Scalar, ...]:
        return (self.operand,)


class OneOut:
    """A node whose result is one value, ``out``."""

    out: Value

    @property
    def outs(self) -> tuple[Value, ...]:
        return (self.out,)


@dataclass(frozen=True, eq=False)
class Pointwise(OneOut):
    """``out[i] = op(operands[i]…)``; every operand's view has the shape of ``out``."""

    op: str
    operands: tuple[Operand | Scalar, ...]
    out: Value


@dataclass(frozen=True, eq=False)
class Concat(Pointwise):
    """``out[o, s, i] = operands[s][o, s, i]``: section ``s``, of ``inner`` elements, comes from operand ``s`` alone.

    Every operand's view has as many elements as ``out`` and is constant along ``s``.
    """

    inner: Dim = 1


@dataclass(frozen=True, eq=False)
class Pad(Pointwise):
    """A matrix with zeros after its columns and rows: ``out[i, j] = operand[i, j]``, and 0 elsewhere.

    A kernel pads the columns of a dense matrix; any other padding is a library call.
    """

    @property
    def columns(self) -> Dim:
        """Elements of a row that come from the operand."""
        return self.operands[0].shape[-1]


@dataclass(frozen=True, eq=False)
class Reduction(OneOperand, OneOut):
    """``out[o, i] = op over r of operand[o, r, i]``, with extents ``outer``, ``reduced``, ``inner``.

    The operand's view enumerates its elements in that order. ``op``: sum, prod, max, min, any, all.
    """

    op: str
    operand: Operand
    outer: Dim
    reduced: Dim
    inner: Dim
    out: Value


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """A call of :mod:`bridge.library` by name.

    An ``OUT_KERNELS`` kernel computes into the dense ``outs``; if ``allocates``, one of ``FUNCTIONS`` returns new
    tensors. ``attrs``: attributes, or arguments with places for tensors: plain frozen data.
    """

    name: str
    operands: tuple[Operand, ...]
    outs: tuple[Value, ...]
    attrs: tuple = ()
    allocates: bool = False


@dataclass(frozen=True, eq=False)
class LoopCall(LibraryCall):
    """A scan (:mod:`autodiff.scan`): operands are dense tensors, ``outs`` its last carries and ys."""

    scan: Scan | None = None


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One PrimFunc in destination-passing style: ``kernel(operands…, outs…, scalars…)``, all tensors dense;
    ``scalars``: integers of each launch."""

    op: str
    operands: tuple[Operand, ...]
    outs: tuple[Value, ...]
    kernel: tvm.tirx.PrimFunc = field(repr=False)
    scalars: tuple[Dim, ...] = ()


@dataclass(frozen=True, eq=False)
class Product(OneOut):
    """``out = a @ b`` by the backend's generated product function of an element type.

    It reads the operands' values in the plan's memory layouts.
    """

    operands: tuple[Operand, ...]
    out: Value
    plan: ProductPlan


Node = Pointwise | Reduction | LibraryCall | KernelCall | Product


@dataclass(frozen=True)
class Positions:
    """A constant of dynamic size: the numbers from ``start`` to ``stop`` by ``step``, as ``arange`` counts.

    A constant that is the same for all sizes is a tensor.
    """

    start: Dim | float
    stop: Dim | float
    step: Dim | float
    dtype: str


@dataclass(eq=False)
class Graph:
    """Nodes in execution order, with the operands that are the results.

    ``constants``: torch tensors or :class:`Positions`.
    """

    params: list[Value]
    constants: dict[Value, object]
    nodes: list[Node]
    results: list[Operand]


def whole(value: Value) -> Operand:
    """The operand that reads all of a value in its memory layout."""
    return Operand(value, dense(value.shape))


def readers_of(nodes: Iterable[Node | LayoutAgnostic]) -> dict[Value, list[Node | LayoutAgnostic]]:
    """The nodes that read each value, once per operand."""
    readers = defaultdict(list)
    for node in nodes:
        for operand in node.operands:
            if isinstance(operand, Operand):
                readers[operand.value].append(node)
    return readers


@dataclass(frozen=True, eq=False)
class Shaped(OneOperand, OneOut):
    """A shape operation: ``out`` has the elements of ``function(view, *arguments)`` of the operand's view.

    ``function`` is :func:`~bridge.compile.loop_ir.views.permute`, ``expand``, ``slice_view`` or ``reshape``; its result
    ``None`` requires a copy.
    """

    function: Callable[..., View | None]
    arguments: tuple
    operand: Operand
    out: Value


@dataclass(frozen=True, eq=False)
class Dense(OneOperand, OneOut):
    """``out`` is a contiguous copy of the operand, for a kernel that reads no views."""

    operand: Operand
    out: Value


@dataclass(frozen=True, eq=False)
class Result(OneOperand, OneOut):
    """``out`` is a result of the function: a node's value, or a parameter itself."""

    operand: Operand | Scalar
    out: Value


@dataclass(frozen=True, eq=False)
class MatMul(OneOut):
    """``out = a @ b`` by numpy's rules for vectors and batches; operands and result have one element type.

    ``bias``: added to each row of a product of matrices, before rounding.
    """

    a: Operand
    b: Operand
    out: Value
    bias: Operand | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self.a, self.b) if self.bias is None else (self.a, self.b, self.bias)


@dataclass(frozen=True, eq=False)
class Join(OneOut):
    """``out`` is the concatenation of the operands along ``axis``."""

    operands: tuple[Operand | Scalar, ...]
    axis: int
    out: Value


LayoutAgnostic = Shaped | Dense | Result | MatMul | Join


def is_turned(node: Shaped) -> bool:
    """Whether a node transposes a row-major matrix."""
    is_reversed = node.arguments in (((1, 0),), (None,)) and len(node.out.shape) == 2
    return node.function is permute and is_reversed and node.operand.is_whole


def eliminate_dead_code(graph: Graph, _: object) -> Graph:
    """Drops nodes that no result needs (a pass recomputes their values elsewhere)."""
    values, found = {output.value for output in graph.results}, []
    for node in reversed(graph.nodes):
        if not values.isdisjoint(node.outs):
            found.append(node)
            values.update(operand.value for operand in node.operands if isinstance(operand, Operand))
    return replace(graph, nodes=found[::-1])
