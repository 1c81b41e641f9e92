"""Layout choice: a layout-agnostic graph → joins, algorithm variants and memory layouts that a backend supports.

Concatenations: a layout-agnostic node → a kernel's node whose sections read their own operands, or torch's ``cat``. A
concatenation along an axis iterates over ``(rows, sections, inner)`` with an unrolled loop over the sections. So the
kernel that sums up and normalizes the gradient of a chunked tensor (an LSTM's gates; query, key and value) also
concatenates it, and a rotary embedding is one kernel. Each section recomputes cheap arithmetic of its operands:
:mod:`bridge.compile.passes.sections`. Where there is little to gain (few rows, short or many sections) torch
concatenates. Both move the same elements.

Layout choice: a layout-agnostic graph → operands are views of stored values, and products have an algorithm. One walk
in execution order, because a product's operands depend on the stored layout of earlier ones. Shape operations become
views; a copy is made if no view expresses one, or if a kernel or caller needs contiguous elements.
:mod:`bridge.compile.passes.choose_products` places matrix products.

Permutations: a permuted copy of cheap arithmetic → the arithmetic in that order from the start. A bias is added while
the heads are transposed; without other consumers, the first order is never stored.

Legalization of views: operands that no single loop nest can read → copies. A kernel needs no division inside its rows
only if its operands' views cut the iteration space at extents that divide one another
(:mod:`bridge.compile.schedule.access`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autodiff.extents import Dim, Extent, same, same_shape, sample_of
from autodiff.ir import inverse
from bridge.compile.loop_ir.graph import (
    Concat,
    Dense,
    Graph,
    Join,
    KernelCall,
    LayoutAgnostic,
    LibraryCall,
    LoopCall,
    MatMul,
    Node,
    Operand,
    Pad,
    Pointwise,
    Product,
    Reduction,
    Result,
    Scalar,
    Shaped,
    Value,
    readers_of,
    whole,
)
from bridge.compile.loop_ir.views import View, dense, expand, is_dense, permute
from bridge.compile.passes.cheap import Producers, permuted_arithmetic
from bridge.compile.passes.choose_products import ProductChoice
from bridge.compile.passes.sections import Placed, is_all_of_a_value
from bridge.compile.schedule.access import make_space, share_loops
from bridge.compile.schedule.fuse import sections_of
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.products import ProductPolicy

__all__ = ["arithmetic_of_copy", "choose_layouts", "is_profitable_to_join", "join"]
__all__ += ["make_walkable", "recompute_permutations"]


def join(placed: Placed, node: Join, rules: Rules) -> Concat | LibraryCall:
    """The concatenating node, for placed operands."""
    joined = _in_a_kernel(node, rules) if is_profitable_to_join(node.operands, node.axis, rules) else None
    if joined is not None:
        return joined
    tensors = [placed.dense(operand) if isinstance(operand, Scalar) else operand for operand in node.operands]
    return LibraryCall("cat", tuple(tensors), (node.out,), (node.axis,))


def is_profitable_to_join(operands: Sequence[Operand | Scalar], axis: int, rules: Rules) -> bool:
    """Whether a kernel should concatenate, if the views of the operands allow it."""
    extents = operands[0].shape
    if all(isinstance(operand, Scalar) for operand in operands):
        return False
    lengths = [operand.shape[axis] for operand in operands]
    if any(isinstance(extent, Extent) for extent in (*lengths, *extents[axis + 1 :])):
        return False  # the sections are unrolled
    step = math.gcd(*lengths)
    rows, inner = sample_of(math.prod(extents[:axis])), step * math.prod(extents[axis + 1 :])
    if rows * inner == 0:
        return False
    limits = rules.limits
    is_joined = 2 <= sum(lengths) // step <= limits.concats.joined_sections
    return is_joined and inner >= rules.order.lanes and rows >= limits.concats.joined_rows


def _in_a_kernel(node: Join, rules: Rules) -> Concat | None:
    """A kernel's concatenation; ``None`` if no loop nest covers all operands."""
    extents, axis = node.out.shape, node.axis
    step = math.gcd(*(operand.shape[axis] for operand in node.operands))
    inner = step * math.prod(extents[axis + 1 :])
    sections = extents[axis] // step
    places = [(operand, begin) for operand in node.operands for begin in range(0, operand.shape[axis], step)]
    spread = (*extents[:axis], sections, step, *extents[axis + 1 :])
    sections_read = tuple(_in_sections(operand, axis, begin, spread) for operand, begin in places)
    concat = Concat("concat", sections_read, node.out, inner)
    accesses = [(operand.view, 1) for operand in sections_read if isinstance(operand, Operand)]
    space = make_space(node.out.numel, sections * inner, [*accesses, (sections_of(concat), 1)], rules, reduces=False)
    return None if space is None else concat


def _in_sections(operand: Operand | Scalar, axis: int, begin: int, spread: tuple[Dim, ...]) -> Operand | Scalar:
    """A part of ``spread[axis + 1]`` elements from ``begin`` on along the axis, repeated for all sections."""
    if isinstance(operand, Scalar):
        return Scalar(operand.number, operand.dtype, spread)
    view = operand.view
    strides = (*view.strides[:axis], 0, *view.strides[axis:])
    return Operand(operand.value, View(spread, strides, view.offset + begin * view.strides[axis]))


def choose_layouts(
    graph: Graph,
    rules: Rules,
    products: ProductPolicy,
    grad_outs: int = 0,
    constants: int = 0,
    lasting: int = 0,
    orders: Mapping[int, Sequence[int]] | None = None,
) -> Graph:
    """Chooses layouts and product algorithms: the graph without layout-agnostic nodes.

    Results are node values or parameters themselves. ``grad_outs``, ``constants``, ``orders``: see
    :class:`~bridge.compile.options.CompileOptions`; ``lasting``: the number of trailing parameters that are the same in
    every step, for a loop's body.
    """
    same, steady = (frozenset(graph.params[len(graph.params) - count :]) for count in (constants, lasting))
    walk = _Walk(rules, ProductChoice(products, readers_of(graph.nodes), same, steady), orders or {})
    walk.gradients.update(graph.params[len(graph.params) - grad_outs :])
    for node in graph.nodes:
        walk.add(node)
    return replace(graph, nodes=_soon(walk.placed.nodes, walk.copied_results), results=walk.results)


def _soon(nodes: Sequence[Node], copies: Collection[Node]) -> list[Node]:
    """Moves each of the copies right after the library call or product whose result it reads: a consumer of one copied
    result then need not wait for all. A kernel stores a copy of its own result at once."""
    makers = {out for node in nodes if isinstance(node, LibraryCall | KernelCall | Product) for out in node.outs}
    behind: dict[Value, list[Node]] = defaultdict(list)
    for copy in copies:
        (read,) = copy.operands
        if isinstance(read, Operand) and read.value in makers:
            behind[read.value].append(copy)
    moved = {copy for each in behind.values() for copy in each}
    found: list[Node] = []
    for node in nodes:
        if node not in moved:
            found += [node, *(copy for out in node.outs for copy in behind.get(out, ()))]
    return found


class _Walk:
    """Places the nodes of a graph in execution order.

    Attributes:
        gradients: all values that depend on the gradient of an output.
        copied_results: copies that serve only as a result.
    """

    def __init__(self, rules: Rules, products: ProductChoice, orders: Mapping[int, Sequence[int]]) -> None:
        self.placed = Placed()
        self.results: list[Operand] = []
        self.gradients: set[Value] = set()
        self.copied_results: list[Node] = []
        self._rules = rules
        self._products = products
        self._orders = orders
        self._where: dict[Value, Operand] = {}  # results of layout-agnostic nodes and copies → their stored elements
        self._usual: dict[Value, View] = {}  # their views if no product's layout were chosen for its consumers

    def add(self, node: Node | LayoutAgnostic) -> None:
        self.placed.name = node.outs[0].name
        operands = tuple(map(self._read, node.operands))
        if any(isinstance(operand, Operand) and operand.value in self.gradients for operand in node.operands):
            self.gradients.update(node.outs)
        match node:
            case Shaped():
                self._where[node.out] = self._shaped(node, *operands)
            case Dense():
                self._where[node.out] = self.placed.dense(*operands)
            case Result():
                self.results.append(self._result(*operands, self._orders.get(len(self.results))))
            case MatMul():
                self._choose_product(node, *operands)
            case Join():
                self.placed.nodes.append(join(self.placed, replace(node, operands=operands), self._rules))
            case Pad():
                self.placed.nodes.append(_padded(replace(node, operands=operands)))
            case Pointwise(op="copy"):
                self._where[node.out] = self.placed.copy(*operands, node.out)
            case LoopCall():
                operands = tuple(each if _is_made_of_parts(each) else self.placed.copy(each) for each in operands)
                self.placed.nodes.append(replace(node, operands=operands))
            case _ if operands == node.operands:
                self.placed.nodes.append(node)
            case Reduction():
                self.placed.nodes.append(replace(node, operand=operands[0]))
            case _:
                self.placed.nodes.append(replace(node, operands=operands))

    def _read(self, operand: Operand | Scalar) -> Operand | Scalar:
        """The stored elements that a layout-agnostic operand reads."""
        if isinstance(operand, Scalar) or operand.value not in self._where:
            return operand
        return self.placed.expand(self._where[operand.value], operand.shape)

    def _usual_view(self, operand: Operand) -> View:
        """An operand's view if every product were stored row-major, whatever its consumers."""
        if operand.value not in self._usual:
            return self._read(operand).view
        return expand(self._usual[operand.value], operand.shape)

    def _choose_product(self, node: MatMul, a: Operand, b: Operand, bias: Operand | None = None) -> None:
        self._where[node.out] = self._products.choose(
            self.placed,
            node,
            (a, self._usual_view(node.a)),
            (b, self._usual_view(node.b)),
            bias,
            is_gradient=node.out in self.gradients,
        )
        if not is_dense(self._where[node.out].view):
            self._usual[node.out] = dense(node.out.shape)

    def _shaped(self, node: Shaped, operand: Operand) -> Operand:
        if node.operand.value in self._usual:
            usual = node.function(self._usual_view(node.operand), *node.arguments)
            self._usual[node.out] = dense(node.out.shape) if usual is None else usual  # it would have been copied
        view = node.function(operand.view, *node.arguments)
        if view is None:
            return Operand(self.placed.copy(operand).value, whole(node.out).view)
        return Operand(operand.value, view)

    def _result(self, operand: Operand | Scalar, order: Sequence[int] | None = None) -> Operand:
        if order is not None and isinstance(operand, Operand) and operand.value.source == "node":
            turned = self._result(Operand(operand.value, permute(operand.view, order)))
            return Operand(turned.value, permute(turned.view, inverse(order)))
        if is_all_of_a_value(operand):
            value = operand.value
            is_param = value.source == "param" and value.order is None
            if value.source == "node" or (is_param and same_shape(operand.shape, value.shape)):
                return operand
        made = self.placed.copied(operand) if self._products.policy.keeps_order else None
        if made is None:
            made = self.placed.pointwise_copy(operand)
            self.copied_results.append(self.placed.nodes[-1])
        return made


def _is_made_of_parts(operand: Operand) -> bool:
    """Whether the operand is contiguous and its offset a multiple of one step's elements."""
    view = operand.view
    part = math.prod(view.shape[1:])
    return is_dense(view) and (same(view.offset, 0) or (isinstance(view.offset, int) and view.offset % part == 0))


def _padded(node: Pad) -> Pad | LibraryCall:
    """A kernel's node if the operand's rows are dense; otherwise a library call."""
    (operand,), out = node.operands, node.out
    in_a_kernel = operand.is_whole and same_shape(operand.shape[:-1], out.shape[:-1])
    return node if in_a_kernel else LibraryCall("pad", (operand,), (out,))


def recompute_permutations(graph: Graph, rules: Rules) -> Graph:
    """Computes copies of permuted cheap arithmetic from that arithmetic's operands."""
    producers, nodes = Producers(rules.limits), []
    for node in graph.nodes:
        nodes.append(arithmetic_of_copy(node, producers, rules) or node)
        producers.add(nodes[-1])
    return replace(graph, nodes=nodes)


def arithmetic_of_copy(node: Node, producers: Producers, rules: Rules) -> Pointwise | None:
    """The point-wise node (one loop nest) that computes a copy from its source's operands; ``None``: keep the copy."""
    if type(node) is not Pointwise or node.op != "copy" or not isinstance(node.operands[0], Operand):
        return None
    (read,) = node.operands
    producer = producers.cheap(read.value)
    moved = None if producer is None else permuted_arithmetic(producer, read)
    if moved is None or same(node.out.numel, 0):
        return None
    views = [operand.view for operand in moved if isinstance(operand, Operand)]
    return Pointwise(producer.op, tuple(moved), node.out) if share_loops(views, node.out.numel, rules) else None


def make_walkable(graph: Graph, rules: Rules) -> Graph:
    """Makes every point-wise node and reduction read views that share loops.

    Concatenations and paddings already do. The library copies a view with more axes than loops.
    """
    copier = _Copier(rules)
    for node in graph.nodes:
        copier.add(node)
    return replace(graph, nodes=copier.nodes)


class _Copier:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.nodes: list[Node] = []
        self._producers = Producers(rules.limits)
        self._known: dict[tuple, Operand] = {}

    def add(self, node: Node) -> None:
        match node:
            case Concat() | Pad():
                pass
            case Pointwise() if not self._is_walkable(node.operands, node.out.numel):
                if node.op == "copy":
                    node = LibraryCall("copy", node.operands, node.outs)
                else:
                    node = replace(node, operands=tuple(self._dense(read, node.out.name) for read in node.operands))
            case Reduction() if not self._is_walkable(
                node.operands, node.operand.view.numel, (node.reduced, node.inner)
            ):
                node = replace(node, operand=self._dense(node.operand, node.out.name))
        self._append(node)

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        self._producers.add(node)
        if type(node) is Pointwise or (isinstance(node, LibraryCall) and node.name == "copy"):
            self._known.setdefault(_key(node), whole(node.outs[0]))

    def _dense(self, operand: Operand | Scalar, name: str) -> Operand | Scalar:
        """A contiguous operand: itself, or a copy of its own."""
        if isinstance(operand, Scalar) or operand.is_whole:
            return operand
        copy: Node = Pointwise("copy", (operand,), Value(name, operand.shape, operand.dtype))
        if not self._is_walkable(copy.operands, copy.out.numel):
            copy = LibraryCall("copy", copy.operands, copy.outs)
        else:
            copy = arithmetic_of_copy(copy, self._producers, self._rules) or copy
        if _key(copy) not in self._known:
            self._append(copy)
        return self._known[_key(copy)]

    def _is_walkable(
        self, operands: tuple[Operand | Scalar, ...], elements: Dim, inside: tuple[Dim, Dim] | None = None
    ) -> bool:
        views = [operand.view for operand in operands if isinstance(operand, Operand)]
        return same(elements, 0) or share_loops(views, elements, self._rules, inside)


def _key(node: Pointwise | LibraryCall) -> tuple:
    """Equal for equal computations; numbers by their text, because 0.0 equals -0.0."""
    op = node.op if isinstance(node, Pointwise) else ("library", node.name)
    return (
        op,
        node.outs[0].shape,
        node.outs[0].dtype,
        *((repr(read.number), read.dtype) if isinstance(read, Scalar) else read for read in node.operands),
    )
