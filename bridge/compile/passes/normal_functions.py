"""Normal distribution: GELU and its gradient of a half type → operators of the distribution, which have quick kernels.

``0.5 * (1 + erf(x * sqrt(0.5)))`` is the probability of a number below ``x``, ``exp(-0.5 * (x * x))`` its density but
for a factor. Of an ``x`` that is a half type's number, what is made of them is rounded to one as well, so the last bits
of float32 make no difference: see :func:`~bridge.compile.codegen.fastmath.normal_cdf`.

They are found in what translation makes, before anything depends on who reads a value: a backward that computes a
value again has the forward's bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Scalar, Value
from bridge.compile.loop_ir.neutral import Neutral
from bridge.compile.passes.dead_code import eliminate_dead_code
from bridge.compile.schedule.limits import Rules

__all__ = ["name_normal_functions"]

_AS_FLOAT32 = 2.0**-24
"""By so much of itself a number may be off, as float32."""


def name_normal_functions(graph: Graph, rules: Rules) -> Graph:
    """A neutral graph with ``normal_cdf`` and ``gaussian`` instead of the arithmetic that says them."""
    makers: dict[Value, Pointwise] = {}
    nodes: list[Node | Neutral] = []
    for node in graph.nodes:
        if type(node) is Pointwise:
            node = _normal_cdf(node, makers) or _gaussian(node, makers) or node
            makers[node.out] = node
        nodes.append(node)
    if nodes == graph.nodes:
        return graph
    return eliminate_dead_code(replace(graph, nodes=nodes), rules)


def _normal_cdf(node: Pointwise, makers: dict[Value, Pointwise]) -> Pointwise | None:
    total = _other(node, "multiply", 0.5, makers)
    root = None if total is None else _other(total, "add", 1.0, makers)
    scaled = None if root is None or root.op != "erf" else makers.get(_value(root.operands[0]))
    x = None if scaled is None else _beside(scaled, "multiply", math.sqrt(0.5))
    return None if x is None or not _is_half(x, makers) else replace(node, op="normal_cdf", operands=(x,))


def _gaussian(node: Pointwise, makers: dict[Value, Pointwise]) -> Pointwise | None:
    scaled = makers.get(_value(node.operands[0])) if node.op == "exp" else None
    square = None if scaled is None else _other(scaled, "multiply", -0.5, makers)
    if square is None or square.op != "multiply" or square.operands[0] != square.operands[1]:
        return None
    (x, _) = square.operands
    is_half = isinstance(x, Operand) and x.is_whole and _is_half(x, makers)
    return replace(node, op="gaussian", operands=(x,)) if is_half else None


def _other(node: Pointwise, op: str, number: float, makers: dict[Value, Pointwise]) -> Pointwise | None:
    """What makes the operand beside a number of a commutative operator."""
    operand = _beside(node, op, number)
    return None if operand is None else makers.get(operand.value)


def _beside(node: Pointwise, op: str, number: float) -> Operand | None:
    """The operand beside a number, all of it."""
    if node.op != op:
        return None
    for one, two in (node.operands, node.operands[::-1]):
        is_number = isinstance(one, Scalar) and isinstance(one.number, int | float)
        is_beside = isinstance(two, Operand) and two.is_whole
        if is_number and is_beside and math.isclose(one.number, number, rel_tol=_AS_FLOAT32):
            return two
    return None


def _value(operand: Operand | Scalar) -> Value | None:
    return operand.value if isinstance(operand, Operand) and operand.is_whole else None


def _is_half(operand: Operand, makers: dict[Value, Pointwise]) -> bool:
    """Whether it is a half type's number in float32."""
    made = makers.get(operand.value)
    if made is None or made.op != "astype" or made.out.dtype != "float32":
        return False
    return made.operands[0].dtype in ("float16", "bfloat16")
