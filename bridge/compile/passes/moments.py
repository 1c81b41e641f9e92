"""Moments of columns: sums of squared differences from a mean → sums of values and of squares at once, in float64.

A batch normalization adds up a tensor for its mean, and reads it again for its variance. The sum of squares less the
square of the sum is the same number, but where the mean is large beside the differences both are, too, and what is left
is rounding. Of half types that is nothing: their squares have 16 or 22 of float64's 53 digits, so sums of thousands of
them are exact, and of a mean that hides their differences nothing of these is left in the numbers either. For
processors whose sums in float64 wait for memory as others do.

Found in what translation makes, before anything depends on who reads a value.
"""

from __future__ import annotations

from dataclasses import replace

from autodiff.extents import same
from bridge.compile.loop_ir.graph import Graph, Node, Operand, Pointwise, Reduction, Scalar, Value, whole
from bridge.compile.loop_ir.neutral import Neutral, Shaped
from bridge.compile.loop_ir.views import alike, merged, reshape
from bridge.compile.passes.dead_code import eliminate_dead_code
from bridge.compile.schedule.limits import Rules

__all__ = ["add_moments_at_once"]

_WIDE = "float64"


def add_moments_at_once(graph: Graph, rules: Rules) -> Graph:
    """A neutral graph whose columns' means and variances of half types are made of sums that one kernel adds."""
    if not rules.adds_float64:
        return graph
    makers = {out: node for node in graph.nodes for out in node.outs}
    squares = {node: total for node in graph.nodes if (total := _sum_of(node, makers)) is not None}
    if not squares:
        return graph
    sums: dict[Node, tuple[Value, Value]] = {}
    nodes: list[Node | Neutral] = []
    for node in graph.nodes:
        if node in squares:
            nodes += _from_sums(node, *sums[squares[node]])
        elif node in squares.values():
            added = _both_sums(node)
            sums[node] = added[1].out, added[3].out
            nodes += added
        else:
            nodes.append(node)
    return eliminate_dead_code(replace(graph, nodes=nodes), rules)


def _sum_of(node: Node | Neutral, makers: dict[Value, Node | Neutral]) -> Reduction | None:
    """The sum of the same columns, of a node that adds up their squared differences from the mean that it makes."""
    square = _maker(node.operand, makers) if _is_column_sum(node) else None
    if type(square) is not Pointwise or square.op != "multiply" or square.operands[0] != square.operands[1]:
        return None
    centred = _maker(square.operands[0], makers)
    if type(centred) is not Pointwise or centred.op != "subtract":
        return None
    x, mean = centred.operands
    if not isinstance(x, Operand) or not isinstance(mean, Operand) or not x.is_whole or not _is_row(mean, node):
        return None
    divided = _behind_views(makers.get(mean.value), makers)
    if type(divided) is not Pointwise or divided.op != "divide":
        return None
    total, count = divided.operands
    if not isinstance(total, Operand) or not isinstance(count, Scalar) or not same(count.number, node.reduced):
        return None
    total = _behind_views(makers.get(total.value), makers) if total.is_whole else None
    is_of_x = _is_column_sum(total) and total.operand.is_whole and total.operand.value is x.value
    is_of_x = is_of_x and _is_half(makers.get(x.value))
    extents = [(total.reduced, total.inner), (node.reduced, node.inner)] if is_of_x else []
    return total if is_of_x and alike(*extents) else None


def _is_column_sum(node: Node | Neutral | None) -> bool:
    is_sum = type(node) is Reduction and node.op == "sum" and node.out.dtype == node.operand.dtype == "float32"
    return is_sum and same(node.outer, 1) and not same(node.inner, 1)


def _is_half(node: Node | Neutral | None) -> bool:
    """Whether a node makes a half type's numbers, in float32."""
    return type(node) is Pointwise and node.op == "astype" and node.operands[0].dtype in ("float16", "bfloat16")


def _is_row(mean: Operand, node: Reduction) -> bool:
    """Whether an operand is one number for each column."""
    wanted = (node.reduced, 0), (node.inner, 1)
    found = merged(mean.view)
    is_all = same(mean.value.numel, node.inner) and same(mean.view.offset, 0)
    return is_all and len(found) == len(wanted) and all(map(alike, found, wanted))


def _maker(operand: Operand | Scalar, makers: dict[Value, Node | Neutral]) -> Node | Neutral | None:
    return makers.get(operand.value) if isinstance(operand, Operand) and operand.is_whole else None


def _behind_views(node: Node | Neutral | None, makers: dict[Value, Node | Neutral]) -> Node | Neutral | None:
    """What makes the numbers of a tensor of another shape."""
    while isinstance(node, Shaped) and node.function is reshape and node.operand.is_whole:
        node = makers.get(node.operand.value)
    return node


def _both_sums(node: Reduction) -> list[Node]:
    """The columns' sums and those of their squares, in float64, and the sums in float32."""
    x = node.operand
    wide = Pointwise("astype", (x,), Value(f"{x.value.name}_wide", x.shape, _WIDE))
    square = Pointwise("multiply", (whole(wide.out),) * 2, Value(f"{x.value.name}_squares", x.shape, _WIDE))
    sums = [
        replace(node, operand=whole(each.out), out=Value(f"{node.out.name}_{name}", node.out.shape, _WIDE))
        for each, name in ((wide, "wide"), (square, "squares"))
    ]
    return [wide, sums[0], square, sums[1], Pointwise("astype", (whole(sums[0].out),), node.out)]


def _from_sums(node: Reduction, total: Value, squares: Value) -> list[Node]:
    """``squares - total * total / count``, which rounding may make less than nothing."""
    count = Scalar(node.reduced, _WIDE, total.shape)
    nothing = Scalar(0.0, _WIDE, total.shape)

    def made(op: str, first: Value, second: Value | Scalar) -> Pointwise:
        other = whole(second) if isinstance(second, Value) else second
        return Pointwise(op, (whole(first), other), Value(f"{node.out.name}_{op}", total.shape, _WIDE))

    mean = made("divide", total, count)
    product = made("multiply", mean.out, total)
    left = made("subtract", squares, product.out)
    positive = made("maximum", left.out, nothing)
    return [mean, product, left, positive, Pointwise("astype", (whole(positive.out),), node.out)]
