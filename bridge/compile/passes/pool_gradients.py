"""Gradients of pools: the library's call → the backend's kernel, where it has one.

Each element looks at the windows that it lies in, and adds up the gradients of those whose maximum it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autodiff.extents import Extent
from bridge.compile.loop_ir.graph import Fallback, Graph, LibraryCall, Node, Operand, Value, whole
from bridge.compile.loop_ir.pool import PoolPlan
from bridge.compile.loop_ir.views import alike, dense, permute
from bridge.compile.schedule.limits import Rules

__all__ = ["generate_pool_gradients"]

_NAME = "max_pool_last_backward"
_TO_FRONT = (0, 3, 1, 2)
_MOST_WINDOWS = 16
"""Whose code a thread of a kernel has one after another."""


def generate_pool_gradients(graph: Graph, rules: Rules) -> Graph:
    """The graph with the gradients of channels_last's maxima computed by kernels of the backend.

    Safe: the same gradients are added in the order in which eager adds them.
    """
    nodes = [_generated(node, rules) or node for node in graph.nodes]
    return graph if nodes == graph.nodes else replace(graph, nodes=nodes)


def _generated(node: Node, rules: Rules) -> Node | None:
    if not isinstance(node, LibraryCall) or node.name != _NAME:
        return None
    grad, positions = node.operands
    _, _, extents, *geometry, _ = node.attrs
    numbers = [*extents, *grad.shape, *positions.shape, *(each for axes in geometry for each in axes)]
    if any(isinstance(number, Extent) for number in numbers):
        return None
    values = [_as_it_lies(operand) for operand in (grad, positions)]
    if None in values or 0 in grad.shape or positions.dtype != "int64":
        return None
    batch, channels, *image = extents
    plan = PoolPlan(grad.dtype, batch, channels, tuple(image), tuple(grad.shape[2:]), *map(tuple, geometry))
    if math.prod(map(plan.overlapping, (0, 1))) > _MOST_WINDOWS:
        return None
    kernel = rules.pool_gradient(plan)
    return None if kernel is None else Fallback(f"library.{_NAME}", tuple(map(whole, values)), node.outs, kernel)


def _as_it_lies(operand: Operand) -> Value | None:
    """The value of an operand that shows channels in their place where they lie behind."""
    shape = tuple(operand.shape[axis] for axis in (0, 2, 3, 1))
    seen, wanted = operand.view, permute(dense(shape), _TO_FRONT)
    is_all = math.prod(shape) == operand.value.numel and seen.offset == wanted.offset
    return operand.value if is_all and alike(seen.strides, wanted.strides) else None
