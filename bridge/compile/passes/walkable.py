"""Permutations: a permuted operand -> read in place, or permuted once.

Permutations: a copy of cheap arithmetic in another order → the arithmetic in that order from the start.
A bias is added while the heads are transposed, and where nothing else reads the first order it is never stored.

Legalization of views: operands that no one loop nest can read together → copies of them, which it can.
Shape operations are views, and a kernel needs no division inside its rows only where the views of its operands cut the
iteration space at extents that divide one another (:mod:`bridge.compile.schedule.access`).
"""

from __future__ import annotations

from dataclasses import replace

from autodiff.extents import Dim, same
from bridge.compile.loop_ir.graph import (
    Concat,
    Graph,
    LibraryCall,
    Node,
    Operand,
    Pad,
    Pointwise,
    Reduction,
    Scalar,
    Value,
    whole,
)
from bridge.compile.passes.cheap import Producers, permuted_arithmetic
from bridge.compile.schedule.access import share_loops
from bridge.compile.schedule.limits import Rules

__all__ = ["arithmetic_of_copy", "make_walkable", "recompute_permutations"]


def recompute_permutations(graph: Graph, rules: Rules) -> Graph:
    """The graph with copies of permuted cheap arithmetic computed from the operands of that arithmetic."""
    producers, nodes = Producers(rules.limits), []
    for node in graph.nodes:
        nodes.append(arithmetic_of_copy(node, producers, rules) or node)
        producers.add(nodes[-1])
    return replace(graph, nodes=nodes)


def arithmetic_of_copy(node: Node, producers: Producers, rules: Rules) -> Pointwise | None:
    """What computes a copy's result in one loop nest from the operands of what it copies; ``None``: it stays a copy."""
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
    """The graph with every point-wise node and reduction reading views that share loops.

    Concatenations and paddings are made of such views in the first place. A view with more axes than loops is copied by
    the library.
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
        """The operand's elements in order, in a value of their own."""
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
    """Equal for nodes that compute the same; numbers by their text, for 0.0 equals -0.0."""
    op = node.op if isinstance(node, Pointwise) else ("library", node.name)
    return (
        op,
        node.outs[0].shape,
        node.outs[0].dtype,
        *((repr(read.number), read.dtype) if isinstance(read, Scalar) else read for read in node.operands),
    )
