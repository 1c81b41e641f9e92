"""Rows added up where indices say (gradients of embeddings and of ``x[indices]``): the library's call → the backend's
kernel, where it has one."""

from __future__ import annotations

import math
from dataclasses import replace

from autodiff.extents import Extent
from bridge.compile.loop_ir.graph import Fallback, Graph, LibraryCall, Node, Operand, Pointwise, Value, whole
from bridge.compile.loop_ir.scatter import ScatterPlan
from bridge.compile.schedule.limits import Rules

__all__ = ["generate_scatter_sums"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INDICES = ("int32", "int64")


def generate_scatter_sums(graph: Graph, rules: Rules) -> Graph:
    """The graph with such sums computed by kernels of the backend.

    Safe: each element is the sum of the same numbers, rounded once, in an order that is the same in every run.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        plan = _plan(node) if isinstance(node, LibraryCall) else None
        kernel = None if plan is None else rules.scatter_sum(plan)
        if kernel is None:
            nodes.append(node)
            continue
        grad, indices = (_lying(operand, nodes) for operand in node.operands)
        keys = Value(f"{node.outs[0].name}_keys", (plan.length + 1,), plan.key_dtype)
        nodes.append(Fallback(f"library.{node.name}", (grad, indices), (*node.outs, keys), kernel))
    return replace(graph, nodes=nodes)


def _plan(node: LibraryCall) -> ScatterPlan | None:
    """Of a call that adds rows of floating point numbers to zeros, whose sizes are known."""
    match node.name, node.operands:
        case "embedding_backward", (grad, indices):
            _, _, table, padding, by_frequency = node.attrs
            if by_frequency or isinstance(table, Extent):
                return None
            skipped, wraps = (padding if padding >= 0 else None), False
        case "index_backward", (grad, indices) if node.attrs[2] == (0,):
            (table, *_), skipped, wraps = node.attrs[1], None, True
        case _:
            return None
    out = node.outs[0]
    if any(isinstance(extent, Extent) for extent in (*grad.shape, *indices.shape, *out.shape)):
        return None
    if grad.dtype not in _FLOATS or indices.dtype not in _INDICES or out.dtype != grad.dtype:
        return None
    length, columns = math.prod(indices.shape), math.prod(out.shape[1:])
    if not length or not out.numel or grad.shape != (*indices.shape, *out.shape[1:]):
        return None
    return ScatterPlan(grad.dtype, indices.dtype, length, table, columns, skipped, wraps)


def _lying(operand: Operand, nodes: list[Node]) -> Operand:
    """An operand that is all of a value, in its order; else a copy of what it shows."""
    if operand.is_whole:
        return whole(operand.value)
    copy = Pointwise("copy", (operand,), Value(operand.value.name, operand.shape, operand.dtype))
    nodes.append(copy)
    return whole(copy.out)
