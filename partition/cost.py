"""Cost model: a value of the graph -> the cost of saving it, of recomputing it, and why it must be saved.

Costs are integers, so that cuts are exact and ties are real. The unit is a quarter of the traffic of one float32
element; only ratios matter. They know about fusion: a point-wise chain recomputed inside a kernel that exists anyway
costs its arithmetic and the reads of its further operands, not a kernel of its own; a value that fusion would have
held in registers costs one more write when it is saved. Symbolic extents count as in the sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autodiff.extents import sample_of
from autodiff.ir import shape
from partition.graph import JointGraph, Node
from partition.ops import (
    CHEAP,
    CHEAP_LIBRARY,
    CREATION,
    PRODUCTS,
    REDUCTIONS,
    ROW,
    SLICES,
    TRANSCENDENTAL,
    TRIVIAL,
    VIEWS,
)

#: A byte that lives until the backward. Partitions exist to save memory: a held byte outweighs 32 times its traffic, so
#: only chains of some dozens of point-wise operations for one saved tensor tip the balance.
HOLD = 64
#: A byte written to, or read from, memory once.
MOVE = 2
#: A point-wise instruction on one element: a quarter of the element's own traffic in float32.
ARITHMETIC = 2
#: exp, erf, tanh and their like on one element: some 10 to 20 vector instructions as polynomials.
TRANSCENDENTAL_ARITHMETIC = 16

_FLOPS_CHEAP, _FLOPS_TRANSCENDENTAL, _FLOPS_ROW = 1, 10, 8


@dataclass(frozen=True)
class Cost:
    """Recomputed work: ``flops`` floating point operations, and ``bytes`` moved if nothing were fused."""

    flops: int
    bytes: int


def is_view(node: Node) -> bool:
    """Whether a binding only views its operand, or names or groups values; casts of bools count: masks stay bytes."""
    if node.op in VIEWS or node.op in SLICES or node.op in TRIVIAL:
        return True
    return node.op == "relax.astype" and str(node.value.args[0].ty.dtype) == "bool"


def is_slice(graph: JointGraph, node: Node) -> bool:
    """Whether a binding is a part of a larger value: a strided slice, or an item of a split."""
    if node.op == "TupleGetItem":
        return graph.nodes[node.inputs[0]].op == "relax.split"
    return node.op in SLICES


def is_item(graph: JointGraph, node: Node) -> bool:
    """Whether a binding is an item of a tuple that a call computes: an independent value, not a view."""
    return node.op == "TupleGetItem" and graph.nodes[node.inputs[0]].op not in (*TRIVIAL, "relax.split", "param")


def is_creation(node: Node) -> bool:
    """Whether a binding reads nothing; constants and fills are duplicated, never saved."""
    return not node.inputs and product(node) is None


def is_widened(graph: JointGraph, name: str) -> bool:
    """Whether a value is a bool in a wider type, as a scaled dropout mask is: recomputed from the bool, never saved."""
    node = graph.nodes[name]
    if node.value is None or node.dtype == "bool" or len(node.inputs) != 1:
        return False
    if node.op not in CHEAP and not (is_view(node) and node.is_tensor):
        return False
    source = node.inputs[0]
    return graph.nodes[source].dtype == "bool" or is_widened(graph, source)


def view_base(graph: JointGraph, name: str) -> str:
    """The value under a chain of views; the value itself if it is no view of one operand."""
    node = graph.nodes[name]
    while node.value is not None and is_view(node) and not is_item(graph, node) and len(node.inputs) == 1:
        node = graph.nodes[node.inputs[0]]
    return node.name


def must_save_reason(graph: JointGraph, name: str) -> str | None:
    """Why a value must not be recomputed, as a phrase, or ``None``; side values may always be recomputed."""
    node = graph.nodes[name]
    if name in graph.kept:
        return "the caller may change what it is computed from"
    if name in graph.side or is_view(node) or is_creation(node):
        return None
    hard = product(node)
    if hard is not None:
        return hard
    if node.op in CHEAP or node.op in TRANSCENDENTAL or node.op in ROW or node.op in CHEAP_LIBRARY:
        return None
    if node.op in CREATION:
        return None
    if node.op in REDUCTIONS:
        return f"{_short(node.op)} is a reduction"
    return f"{_short(node.op)} is not known to be point-wise"


def product(node: Node) -> str | None:
    """Why a value is as expensive as a matrix product, or ``None``; only the user may allow recomputing products."""
    if node.op in PRODUCTS:
        return f"{_short(node.op)} is a matrix product or convolution"
    if node.op.startswith("library.") and node.op not in CHEAP_LIBRARY and node.op not in CREATION:
        return f"{node.op} is a library call"
    if node.op in ("relax.call_pure_packed", "relax.call_tir", "relax.call_dps_packed"):
        return f"{_short(node.op)} calls code whose cost is unknown"
    return None


def save_cost(graph: JointGraph, name: str) -> int | None:
    """The cost of saving a value until the backward, or ``None`` if it is never saved itself.

    Views are saved as their base, tuples as their items, bools as bools; creations are recomputed.
    """
    node = graph.nodes[name]
    if name in graph.kept:
        return node.bytes * (HOLD + MOVE)
    if not node.is_tensor or is_creation(node) or is_widened(graph, name):
        return None
    if is_view(node) and not is_item(graph, node):
        if not (is_slice(graph, node) and node.bytes < graph.nodes[view_base(graph, name)].bytes):
            return None
        return node.bytes * (HOLD + MOVE)
    return node.bytes * (HOLD if materialized(graph, name) else HOLD + MOVE)


def recompute_cost(graph: JointGraph, name: str) -> int:
    """The cost of computing a value in the backward from its operands; for side values only the further reads."""
    node = graph.nodes[name]
    if is_view(node) or is_creation(node):
        return 0
    operands = sorted(graph.nodes[view_base(graph, read)].bytes for read in node.inputs)
    cost = MOVE * sum(operands[:-1])
    if name in graph.side:
        return cost
    if node.op in TRANSCENDENTAL:
        cost += TRANSCENDENTAL_ARITHMETIC * node.elements
    elif node.op in CHEAP or node.op in CREATION:
        cost += ARITHMETIC * node.elements
    elif node.op in ROW:
        cost += (TRANSCENDENTAL_ARITHMETIC + ARITHMETIC) * node.elements + MOVE * (sum(operands[-1:]) + node.bytes)
    else:
        cost += ARITHMETIC * flops(graph, name) + MOVE * (sum(operands[-1:]) + node.bytes)
    if read_by_kernel(graph, name, graph.adjoint):
        cost += 2 * MOVE * node.bytes
    return cost


def materialized(graph: JointGraph, name: str) -> bool:
    """Whether the forward stores a value in any case: its own kernel, or a reader's, does not fuse."""
    fuses = any(graph.nodes[name].op in each for each in (CHEAP, TRANSCENDENTAL, VIEWS, SLICES))
    return not fuses or read_by_kernel(graph, name, graph.forward)


def read_by_kernel(graph: JointGraph, name: str, within: frozenset[str]) -> bool:
    """Whether a kernel that does not fuse, among the bindings ``within``, reads a value, directly or as a view."""
    for user in graph.users[name]:
        node = graph.nodes[user]
        if is_view(node):
            if read_by_kernel(graph, user, within):
                return True
        elif user in within and product(node) is not None:
            return True
    return False


def flops(graph: JointGraph, name: str) -> int:
    """Floating point operations of one binding: exact for a matmul, an estimate for everything else.

    A product of unknown algorithm counts 2·√(|a|·|b|·|out|), the exact count for matrices.
    """
    node = graph.nodes[name]
    if is_view(node) or is_creation(node):
        return 0
    elements = _result_elements(graph, node)
    operands = sorted(graph.nodes[read].elements for read in node.inputs)
    if node.op == "relax.matmul":
        return 2 * elements * sample_of(shape(node.value.args[0])[-1])
    if product(node) is not None and len(operands) > 1:
        return 2 * math.isqrt(operands[-1] * operands[-2] * elements)
    if node.op in TRANSCENDENTAL:
        return _FLOPS_TRANSCENDENTAL * elements
    if node.op in ROW:
        return _FLOPS_ROW * elements
    return _FLOPS_CHEAP * max([elements, *operands[-1:]])


def moved_bytes(graph: JointGraph, name: str) -> int:
    """Bytes that one binding reads and writes if nothing is fused."""
    node = graph.nodes[name]
    return node.bytes + sum(graph.nodes[view_base(graph, read)].bytes for read in node.inputs)


def _result_elements(graph: JointGraph, node: Node) -> int:
    if node.is_tensor:
        return node.elements
    return sum(graph.nodes[user].elements for user in graph.users[node.name] if graph.nodes[user].op == "TupleGetItem")


def _short(op: str) -> str:
    return op.removeprefix("relax.").removeprefix("nn.")
