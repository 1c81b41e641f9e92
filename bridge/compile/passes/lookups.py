"""Lookups: rows of a table at indices (embeddings, ``x[indices]``), and rows added up where indices say, which are
their gradients: the library's call → the backend's kernel, where it has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm.tirx import PrimFunc

from autodiff.extents import Dim, Extent, same, sample_of
from bridge.compile.loop_ir.access import Argument
from bridge.compile.loop_ir.graph import Fallback, Graph, LibraryCall, Operand, Value, whole
from bridge.compile.loop_ir.lookup import LookupPlan
from bridge.compile.loop_ir.scatter import ScatterPlan
from bridge.compile.passes.placed import Placed
from bridge.compile.schedule.limits import Rules
from bridge.library import TensorAt

__all__ = ["generate_lookups"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INDICES = ("int32", "int64")


def generate_lookups(graph: Graph, rules: Rules) -> Graph:
    """The graph with lookups and their gradients computed by kernels of the backend.

    Of a length that varies, the sample's decides who sorts indices.

    Safe: rows are copied; each element of a gradient is the sum of the same numbers, rounded once, in an order that is
    the same in every run.
    """
    placed = Placed()
    for node in graph.nodes:
        made = _generated(node, placed, rules) if isinstance(node, LibraryCall) else None
        placed.nodes.append(node if made is None else made)
    return replace(graph, nodes=placed.nodes)


def _generated(node: LibraryCall, placed: Placed, rules: Rules) -> Fallback | None:
    """What takes a call's place, what it reads being placed; ``None``: the call stays."""
    if (found := _lookup(node)) is not None:
        kernel = rules.lookup(found)
        return None if kernel is None else _call(node, node.operands, node.outs, kernel)
    plan = _scatter(node)
    if plan is None:
        return None
    grad, indices = node.operands
    length = indices.view.numel
    about = sample_of(length)
    if rules.sorts_before(plan, about):
        plan = replace(plan, is_sorted=True)
    kernel = rules.scatter_sum(plan, about)
    if kernel is None:
        return None
    placed.name = node.outs[0].name
    rows, keys = placed.dense(grad), placed.fresh((length + 1,), plan.key_dtype)
    if not plan.is_sorted:
        return _call(node, (rows, placed.dense(indices)), (*node.outs, keys), kernel)
    wanted = TensorAt(0), plan.table, plan.key_dtype
    placed.nodes.append(LibraryCall("sorted_keys", (indices,), (keys,), wanted, allocates=True))
    return _call(node, (rows, whole(keys)), node.outs, kernel)


def _call(node: LibraryCall, operands: Sequence[Operand], outs: Sequence[Value], kernel: PrimFunc) -> Fallback:
    """A kernel in the place of a call, which is told how many indices this has if that varies."""
    length = node.operands[1].view.numel
    scalars = (length,) if isinstance(length, Extent) else ()
    return Fallback(f"library.{node.name}", tuple(operands), tuple(outs), kernel, scalars)


def _number(length: Dim) -> int | Argument:
    return Argument(0) if isinstance(length, Extent) else length


def _lookup(node: LibraryCall) -> LookupPlan | None:
    """Of a call that reads rows of a table that lies as it is, whose size is known, by indices that do."""
    match node.name, node.operands:
        case "embedding", (table, indices):
            wraps = False
        case "index", (table, indices) if node.attrs[1] == (0,):
            wraps = True
        case _:
            return None
    if not table.is_whole or not indices.is_whole or any(isinstance(extent, Extent) for extent in table.shape):
        return None
    if table.dtype not in _FLOATS or indices.dtype not in _INDICES:
        return None
    rows, columns = table.shape[0], math.prod(table.shape[1:])
    if not rows * columns or same(indices.view.numel, 0):
        return None
    return LookupPlan(table.dtype, indices.dtype, _number(indices.view.numel), rows, columns, wraps)


def _scatter(node: LibraryCall) -> ScatterPlan | None:
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
    return ScatterPlan(grad.dtype, indices.dtype, _number(length), table, math.prod(out.shape[1:]), skipped, wraps)
