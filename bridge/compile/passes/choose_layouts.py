"""Layout choice: a neutral graph → one whose operands are views of what is stored, and whose products have a way.

One walk in order of execution, for what a product is given depends on how earlier ones are stored. Shape operations
become views; where none expresses one, and where a kernel or a caller wants elements in order, there is a copy. Matrix
products are :mod:`bridge.compile.passes.choose_products`'s, concatenations :mod:`bridge.compile.passes.choose_joins`'s.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autodiff.extents import same
from bridge.compile.loop_ir.graph import (
    Fallback,
    Graph,
    LibraryCall,
    LoopCall,
    Node,
    Operand,
    Pad,
    Pointwise,
    Product,
    Reduction,
    Scalar,
    Value,
    whole,
)
from bridge.compile.loop_ir.neutral import Dense, Join, MatMul, Neutral, Result, Shaped
from bridge.compile.loop_ir.views import View, alike, dense, expand, inverse, is_dense, permute
from bridge.compile.passes.choose_joins import join
from bridge.compile.passes.choose_products import ProductChoice
from bridge.compile.passes.placed import Placed, is_all_of_a_value
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.products import ProductPolicy

__all__ = ["choose_layouts"]


def choose_layouts(
    graph: Graph,
    rules: Rules,
    products: ProductPolicy,
    grad_outs: int = 0,
    constants: int = 0,
    lasting: int = 0,
    chained: Collection[MatMul] = (),
    orders: Mapping[int, Sequence[int]] | None = None,
) -> Graph:
    """The graph without neutral nodes, by a backend's rules and its choices for matrix products.

    Results are values of their own, or parameters themselves. ``grad_outs``, ``constants``, ``orders``: see
    :class:`~bridge.compile.options.CompileOptions`; ``lasting``: parameters, the last ones, that are the same in every
    step of the loop whose body the graph is; ``chained``: products that are computed in chains
    (:mod:`bridge.compile.passes.chains`).
    """
    same, steady = (frozenset(graph.params[len(graph.params) - count :]) for count in (constants, lasting))
    walk = _Walk(rules, ProductChoice(products, _readers(graph.nodes), same, steady, chained), orders or {})
    walk.gradients.update(graph.params[len(graph.params) - grad_outs :])
    for node in graph.nodes:
        walk.add(node)
    return replace(graph, nodes=_soon(walk.placed.nodes, walk.copied_results), results=walk.results)


def _soon(nodes: Sequence[Node], copies: Collection[Node]) -> list[Node]:
    """The nodes, each of these copies right behind the library call or product whose result it reads: at the end, who
    waits for one result would wait for all. A kernel stores a copy of what it computes as it computes it."""
    makers = {out for node in nodes if isinstance(node, LibraryCall | Fallback | Product) for out in node.outs}
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


def _readers(nodes: Iterable[Node | Neutral]) -> dict[Value, list[Node | Neutral]]:
    readers = defaultdict(list)
    for node in nodes:
        for operand in node.operands:
            if isinstance(operand, Operand):
                readers[operand.value].append(node)
    return readers


class _Walk:
    """
    Attributes:
        gradients: all values that depend on the gradient of an output.
        copied_results: copies that were made for a result alone.
    """

    def __init__(self, rules: Rules, products: ProductChoice, orders: Mapping[int, Sequence[int]]) -> None:
        self.placed = Placed()
        self.results: list[Operand] = []
        self.gradients: set[Value] = set()
        self.copied_results: list[Node] = []
        self._rules = rules
        self._products = products
        self._orders = orders
        self._where: dict[Value, Operand] = {}  # results of neutral nodes, and copies that were there already
        self._usual: dict[Value, View] = {}  # how those would be read if no product were stored for its readers

    def add(self, node: Node | Neutral) -> None:
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
        """Where the elements are that a neutral operand reads."""
        if isinstance(operand, Scalar) or operand.value not in self._where:
            return operand
        return self.placed.expand(self._where[operand.value], operand.shape)

    def _usual_view(self, operand: Operand) -> View:
        """The view of a neutral operand if every product were stored in its own order, whoever reads it."""
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
            if value.source == "node" or (is_param and alike(operand.shape, value.shape)):
                return operand
        made = self.placed.copied(operand) if self._products.policy.keeps_order else None
        if made is None:
            made = self.placed.pointwise_copy(operand)
            self.copied_results.append(self.placed.nodes[-1])
        return made


def _is_made_of_parts(operand: Operand) -> bool:
    """Whether the elements lie one after another, from as many on as some parts with one step each have."""
    view = operand.view
    part = math.prod(view.shape[1:])
    return is_dense(view) and (same(view.offset, 0) or (isinstance(view.offset, int) and view.offset % part == 0))


def _padded(node: Pad) -> Pad | LibraryCall:
    """A node of a kernel, where rows lie as the operand has them; a library call where not."""
    (operand,), out = node.operands, node.out
    in_a_kernel = operand.is_whole and alike(operand.shape[:-1], out.shape[:-1])
    return node if in_a_kernel else LibraryCall("pad", (operand,), (out,))
