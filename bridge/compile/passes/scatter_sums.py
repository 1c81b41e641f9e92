"""Rows added up where indices say (gradients of embeddings and of ``x[indices]``): the library's call → the backend's
kernel, where it has one."""

from __future__ import annotations

import math
from dataclasses import replace

from autodiff.extents import Extent, same, sample_of
from bridge.compile.loop_ir.access import Argument
from bridge.compile.loop_ir.graph import Fallback, Graph, LibraryCall, Node, Operand, Pointwise, Value, whole
from bridge.compile.loop_ir.scatter import ScatterPlan
from bridge.compile.schedule.limits import Rules
from bridge.library import TensorAt

__all__ = ["generate_scatter_sums"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INDICES = ("int32", "int64")


def generate_scatter_sums(graph: Graph, rules: Rules) -> Graph:
    """The graph with such sums computed by kernels of the backend.

    Of a length that varies, the sample's decides who sorts.

    Safe: each element is the sum of the same numbers, rounded once, in an order that is the same in every run.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        plan = _plan(node) if isinstance(node, LibraryCall) else None
        length = None if plan is None else node.operands[1].view.numel
        if plan is not None and rules.sorts_before(plan, sample_of(length)):
            plan = replace(plan, is_sorted=True)
        kernel = None if plan is None else rules.scatter_sum(plan)
        if kernel is None:
            nodes.append(node)
            continue
        grad, indices = node.operands
        keys = Value(f"{node.outs[0].name}_keys", (length + 1,), plan.key_dtype)
        if plan.is_sorted:
            wanted = TensorAt(0), plan.table, plan.wraps, plan.key_dtype
            nodes.append(LibraryCall("sorted_keys", (indices,), (keys,), wanted, allocates=True))
            operands, outs = (_lying(grad, nodes), whole(keys)), node.outs
        else:
            operands, outs = (_lying(grad, nodes), _lying(indices, nodes)), (*node.outs, keys)
        scalars = () if isinstance(plan.length, int) else (length,)
        nodes.append(Fallback(f"library.{node.name}", operands, outs, kernel, scalars))
    return replace(graph, nodes=nodes)


def _plan(node: LibraryCall) -> ScatterPlan | None:
    """Of a call that adds rows of floating point numbers to zeros, as many of them as one knows."""
    match node.name, node.operands:
        case "embedding_backward", (grad, indices):
            _, _, table, padding, by_frequency = node.attrs
            if by_frequency:
                return None
            skipped, wraps = (padding if padding >= 0 else None), False
        case "index_backward", (grad, indices) if node.attrs[2] == (0,):
            (table, *_), skipped, wraps = node.attrs[1], None, True
        case _:
            return None
    out = node.outs[0]
    if any(isinstance(extent, Extent) for extent in (table, *out.shape)) or out.numel == 0:
        return None
    if grad.dtype not in _FLOATS or indices.dtype not in _INDICES or out.dtype != grad.dtype:
        return None
    length, wanted = indices.view.numel, (*indices.shape, *out.shape[1:])
    if same(length, 0) or len(grad.shape) != len(wanted) or not all(map(same, grad.shape, wanted)):
        return None
    number = Argument(0) if isinstance(length, Extent) else length
    return ScatterPlan(grad.dtype, indices.dtype, number, table, math.prod(out.shape[1:]), skipped, wraps)


def _lying(operand: Operand, nodes: list[Node]) -> Operand:
    """An operand that is all of a value, in its order; else a copy of what it shows."""
    if operand.is_whole:
        return whole(operand.value)
    copy = Pointwise("copy", (operand,), Value(operand.value.name, operand.shape, operand.dtype))
    nodes.append(copy)
    return whole(copy.out)
