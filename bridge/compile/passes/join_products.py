"""Joined products: gradients of several projections of one input → products of the concatenated gradients.

Query, key and value of an attention read one input ``x``. With the gradient ``g`` of each, its weight's gradient is
``gᵀ @ x``, and the input's gradient is the sum of ``g @ w``. All ``g`` are permuted copies (of heads), so they are
copied side by side: one product makes all weight gradients, one the input's gradient, one row sum all bias gradients.
Small products leave most of a GPU idle; the sum of products becomes one product with a longer inner axis. If a fused
attention kernel already makes ``g`` in that order, the copies are extra work, and the products save several times it.

The same numbers are multiplied and added; the order of a sum follows the longer axis, so results differ by rounding.
Therefore only gradients are joined: no other function computes them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autodiff.extents import Dim, Extent, same
from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.graph import (
    Graph,
    Join,
    LayoutAgnostic,
    LibraryCall,
    MatMul,
    Node,
    Operand,
    Pointwise,
    Reduction,
    Shaped,
    Value,
    whole,
)
from bridge.compile.loop_ir.views import alike

__all__ = ["join_products"]

_SMALL = 2**21
"""Elements of a weight from which on one product fills a GPU."""

AnyNode = Node | LayoutAgnostic


def join_products(graph: Graph, grad_outs: int) -> Graph:
    """Joins gradient products of projections; ``grad_outs``: see :class:`~bridge.compile.options.CompileOptions`."""
    for branches in _Reading(graph).groups(graph.params[len(graph.params) - grad_outs :]) if grad_outs else ():
        joined = _Joining(graph, branches).joined()
        graph = graph if joined is None else joined
    return graph


@dataclass(frozen=True)
class _Branch:
    """One projection: its gradient as a matrix (``rows``) and before the reshape (``heads``); its weight's gradient."""

    rows: Value
    heads: Value
    weight: MatMul
    turned: Shaped

    @property
    def form(self) -> tuple:
        """Shapes and element type; equal for joined projections."""
        return _plain((self.heads.shape, self.rows.shape, self.rows.dtype))


class _Reading:
    """Producers and consumers of the values of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.makers = {out: node for node in graph.nodes for out in node.outs}
        self.readers: defaultdict[Value, list[AnyNode]] = defaultdict(list)
        for node in graph.nodes:
            for operand in node.operands:
                if isinstance(operand, Operand):
                    self.readers[operand.value].append(node)

    def groups(self, gradients: Sequence[Value]) -> list[list[_Branch]]:
        """Groups of two or more projections with one input and equal shapes."""
        depending, found = set(gradients), defaultdict(list)
        for node in self.nodes:
            if any(isinstance(each, Operand) and each.value in depending for each in node.operands):
                depending.update(node.outs)
            branch = self._branch(node) if isinstance(node, MatMul) else None
            if branch is not None and branch.rows in depending and node.b.value not in depending:
                found[node.b.value, branch.form].append(branch)
        return [group for group in found.values() if len({each.heads for each in group}) == len(group) > 1]

    def _branch(self, node: MatMul) -> _Branch | None:
        """The projection of a weight gradient ``permuted copyᵀ @ x``, if small enough."""
        turned = self._shaped(node.a, views.permute)
        if turned is None or turned.arguments != ((1, 0),) or not node.b.is_whole or not _small(node.out.shape):
            return None
        reshaped = self._shaped(turned.operand, views.reshape)
        if reshaped is None or not self._may_lie_elsewhere(reshaped.operand):
            return None
        rows, heads = reshaped.out, reshaped.operand.value
        axis = _axis(rows, heads) if len(rows.shape) == 2 else None
        if axis is None or not all(isinstance(extent, int) for extent in (rows.shape[1], heads.shape[axis])):
            return None
        return _Branch(rows, heads, node, turned)

    def _may_lie_elsewhere(self, heads: Operand) -> bool:
        """Whether ``heads`` is a permuted copy or a library call's result: a product could read any other as it is."""
        return self._shaped(heads, views.permute) is not None or isinstance(self.makers.get(heads.value), LibraryCall)

    def _shaped(self, operand: Operand, function) -> Shaped | None:
        """The node of shape operation ``function`` that makes the operand, if all elements of both values are read."""
        made = self.makers.get(operand.value)
        if not isinstance(made, Shaped) or made.function is not function:
            return None
        return made if operand.is_whole and made.operand.is_whole else None


def _small(extents: Sequence) -> bool:
    return len(extents) == 2 and all(isinstance(extent, int) for extent in extents) and math.prod(extents) <= _SMALL


def _axis(rows: Value, heads: Value) -> int | None:
    """The first axis of ``heads`` that belongs to a row."""
    places = range(1, len(heads.shape))
    return next((at for at in places if same(math.prod(heads.shape[:at]), rows.shape[0])), None)


def _plain(value: Any) -> Any:
    """Sizes as nested tuples, for a structural comparison: comparing extents would add guards."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return (Extent, value.terms) if isinstance(value, Extent) else value


class _Joining(_Reading):
    """Rewrites one group."""

    def __init__(self, graph: Graph, branches: Sequence[_Branch]) -> None:
        super().__init__(graph)
        self.graph, self.branches = graph, branches
        self.gone: set[AnyNode] = set()
        self.added: list[AnyNode] = []

    def joined(self) -> Graph | None:
        """The rewritten graph; ``None`` if the projections' gradients have other consumers."""
        inputs = self._inputs()
        if inputs is None:
            return None
        first = self.branches[0]
        count, (rows, width) = len(self.branches), first.rows.shape
        heads, axis = first.heads, _axis(first.rows, first.heads)
        shape = (*heads.shape[:axis], count * heads.shape[axis], *heads.shape[axis + 1 :])
        side = Value(heads.name, shape, heads.dtype)
        self.added.append(Join(tuple(whole(each.heads) for each in self.branches), axis, side))
        matrix = self._shape(views.reshape, ((rows, count * width),), side, (rows, count * width))
        self._weights(matrix)
        if inputs:
            self._input(matrix, *inputs)
        self._biases(matrix)
        return self._ordered()

    def _inputs(self) -> tuple[list[MatMul], Pointwise, set[AnyNode]] | tuple[()] | None:
        """The products with the weights, the last addition and all additions; ``()`` without products."""
        products: list[MatMul] = []
        for each in self.branches:
            others = [node for node in self.readers[each.rows] if node is not each.turned]
            if len(self.readers[each.turned.out]) != 1 or len(others) > 1:
                return None
            products += others
        if not products:
            return ()
        if len(products) != len(self.branches) or not all(isinstance(node, MatMul) for node in products):
            return None
        first = products[0]
        for node, each in zip(products, self.branches, strict=True):
            reads_rows = node.a.value is each.rows and node.a.is_whole
            if not reads_rows or not node.b.is_whole or len(node.b.shape) != 2:
                return None
            if not alike(node.b.shape, first.b.shape) or node.b.dtype != first.b.dtype:
                return None
        parts: dict[Value, int] = {node.out: 1 for node in products}
        between: set[AnyNode] = set()
        for node in self.nodes:
            if type(node) is not Pointwise or node.op != "add" or not alike(node.out.shape, first.out.shape):
                continue
            terms = [each for each in node.operands if isinstance(each, Operand) and each.value in parts]
            if len(terms) < 2 or any(not each.is_whole or len(self.readers[each.value]) != 1 for each in terms):
                continue
            between.add(node)
            parts[node.out] = sum(parts[each.value] for each in terms)
            if parts[node.out] == len(products):
                return products, node, between
        return None

    def _weights(self, matrix: Value) -> None:
        count, width = len(self.branches), matrix.shape[1]
        first = self.branches[0].weight
        turned = self._shape(views.permute, ((1, 0),), matrix, (width, matrix.shape[0]))
        out = Value(first.out.name, (width, first.out.shape[1]), first.out.dtype)
        self.added.append(MatMul(whole(turned), first.b, out))
        for each in self.branches:
            self.gone |= {each.weight, each.turned}
        self._hand_out(out, [each.weight.out for each in self.branches], width // count)

    def _input(self, matrix: Value, products: list[MatMul], last: Pointwise, sums: set[AnyNode]) -> None:
        inner, columns = products[0].b.shape
        weights = Value(products[0].b.value.name, (len(products) * inner, columns), products[0].b.dtype)
        self.added.append(Join(tuple(node.b for node in products), 0, weights))
        self.gone |= {*products, *sums}
        self.added.append(MatMul(whole(matrix), whole(weights), last.out))

    def _biases(self, matrix: Value) -> None:
        """Joins the row sums, if each projection has one of the same form."""
        rows, width = self.branches[0].rows.shape
        found = [self._sums(each) for each in self.branches]
        if any(len(each) != 1 for each in found):
            return
        chains = [each[0] for each in found]
        first = chains[0][-1]
        if any([_form(node) for node in chain] != [_form(node) for node in chains[0]] for chain in chains):
            return
        summed = matrix
        for node in chains[0][:-1]:
            if isinstance(node, Pointwise):
                summed = self._cast(summed, node.out.dtype)
        out = Value(first.out.name, (matrix.shape[1],), first.out.dtype)
        self.added.append(Reduction("sum", whole(summed), 1, rows, matrix.shape[1], out))
        self.gone.update(chain[-1] for chain in chains)
        self._hand_out(out, [chain[-1].out for chain in chains], width)

    def _sums(self, branch: _Branch) -> list[list[AnyNode]]:
        """Row sums of a projection's gradient, as chains of nodes: reshape, perhaps a cast, sum."""
        rows, width = branch.rows.shape
        found = []
        for read in self.readers[branch.heads]:
            if not isinstance(read, Shaped) or read.function is not views.reshape or read.out is branch.rows:
                continue
            chain: list[AnyNode] = [read]
            while len(self.readers[chain[-1].outs[0]]) == 1:
                (node,) = self.readers[chain[-1].outs[0]]
                if not node.operands[0].is_whole:
                    break
                chain.append(node)
                if type(node) is not Pointwise or node.op != "astype":
                    break
            last = chain[-1]
            is_sum = isinstance(last, Reduction) and last.op == "sum"
            if is_sum and alike((last.outer, last.reduced, last.inner), (1, rows, width)):
                found.append(chain)
        return found

    def _hand_out(self, joined: Value, parts: list[Value], each: int) -> None:
        """Slices the joined value into the parts, ``each`` long; common casts and reshapes apply to the whole value."""
        while all(len(self.readers[part]) == 1 for part in parts):
            nodes = [self.readers[part][0] for part in parts]
            if any(not node.operands[0].is_whole or _form(node) != _form(nodes[0]) for node in nodes):
                break
            if isinstance(nodes[0], Pointwise) and nodes[0].op == "astype":
                joined = self._cast(joined, nodes[0].out.dtype)
            elif not (isinstance(nodes[0], Shaped) and nodes[0].function is views.reshape):
                break
            elif not alike(nodes[0].out.shape, parts[0].shape) or not alike(nodes[0].operand.shape, parts[0].shape):
                break
            self.gone.update(nodes)
            parts = [node.outs[0] for node in nodes]
        for index, part in enumerate(parts):
            arguments = (0, index * each, (index + 1) * each, 1)
            if len(joined.shape) > 1 or alike(part.shape, (each,)):
                self.added.append(Shaped(views.slice_view, arguments, whole(joined), part))
                continue
            sliced = self._shape(views.slice_view, arguments, joined, (each,))
            self.added.append(Shaped(views.reshape, (part.shape,), whole(sliced), part))

    def _cast(self, value: Value, dtype: str) -> Value:
        out = Value(value.name, value.shape, dtype)
        self.added.append(Pointwise("astype", (whole(value),), out))
        return out

    def _shape(self, function, arguments: tuple, value: Value, extents: tuple[Dim, ...]) -> Value:
        out = Value(value.name, extents, value.dtype)
        self.added.append(Shaped(function, arguments, whole(value), out))
        return out

    def _ordered(self) -> Graph | None:
        """The graph in execution order; ``None`` if a joined product depends on itself."""
        nodes = [node for node in self.nodes if node not in self.gone] + self.added
        makers = {out: node for node in nodes for out in node.outs}
        waits = {
            node: {makers[each.value] for each in node.operands if isinstance(each, Operand) and each.value in makers}
            for node in nodes
        }
        done: dict[AnyNode, None] = {}
        begun: Counter[AnyNode] = Counter()
        for start in nodes:
            stack = [start]
            while stack:
                node = stack[-1]
                missing = [each for each in waits[node] if each not in done] if node not in done else []
                if not missing:
                    done.setdefault(stack.pop())
                    continue
                begun[node] += 1
                if begun[node] > 1:
                    return None
                stack += missing
        return replace(self.graph, nodes=_read(list(done)))


def _read(nodes: list[AnyNode]) -> list[AnyNode]:
    """Drops shape operations and point-wise nodes without consumers."""
    wanted: set[Value] = set()
    kept: list[AnyNode] = []
    for node in reversed(nodes):
        if type(node) in (Shaped, Pointwise) and not wanted.intersection(node.outs):
            continue
        wanted.update(each.value for each in node.operands if isinstance(each, Operand))
        kept.append(node)
    return kept[::-1]


def _form(node: AnyNode) -> tuple:
    """A comparable description of a node's operation on its one operand."""
    match node:
        case Shaped():
            return "shaped", node.function, _plain(node.arguments)
        case Reduction():
            return node.op, _plain((node.outer, node.reduced, node.inner)), node.out.dtype
        case Pointwise():
            return node.op, len(node.operands), node.out.dtype
    return (node,)
