"""Patterns: moments, the normal distribution, lookups, gradients of pools → one node each.

Moments and normal distribution are found in translation's output, before a decision depends on consumers: a backward
that recomputes a value gets the forward's bits.

Moments of columns: sums of squared differences from a mean → sums of values and of squares in one pass, in float64. A
batch normalization sums up a tensor for its mean, and reads it again for its variance. The sum of squares minus the
squared sum over the count is the same number, but a mean much larger than the differences would leave only rounding
errors. Not so for half types: their squares have 16 or 22 of float64's 53 digits, so sums of thousands of them are
exact, and no mean hides differences that the half type has. For processors whose float64 sums are memory-bound.

Normal distribution: GELU and its gradient for a half type → operators of the distribution, which have fast kernels.
``0.5 * (1 + erf(x * sqrt(0.5)))`` is the probability of a number below ``x``, ``exp(-0.5 * (x * x))`` its density up to
a factor. For an ``x`` of a half type the results are rounded to it as well, so the last bits of float32 make no
difference: see :func:`~bridge.compile.codegen.fastmath.normal_cdf`.

Gradients of pools: the library's call → the backend's kernel, if it has one. Each element adds up the gradients of the
windows that contain it and have their maximum there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm.tirx import PrimFunc

from autodiff.extents import Dim, Extent, same, same_shape, sample_of
from bridge.compile.loop_ir.graph import (
    Graph,
    KernelCall,
    LayoutAgnostic,
    LibraryCall,
    Node,
    Operand,
    Pointwise,
    Reduction,
    Scalar,
    Shaped,
    Value,
    eliminate_dead_code,
    whole,
)
from bridge.compile.loop_ir.operations import Argument, LookupPlan, PoolPlan, ScatterPlan
from bridge.compile.loop_ir.views import dense, merged, permute, reshape
from bridge.compile.passes.sections import Placed
from bridge.compile.schedule.limits import Rules
from bridge.library import TensorAt

__all__ = ["add_moments_at_once", "generate_lookups", "generate_pool_gradients", "name_normal_functions"]

_WIDE = "float64"


def add_moments_at_once(graph: Graph, rules: Rules) -> Graph:
    """Makes means and variances of half-type columns from sums that one kernel adds, in a layout-agnostic graph."""
    if not rules.adds_float64:
        return graph
    makers = {out: node for node in graph.nodes for out in node.outs}
    squares = {node: total for node in graph.nodes if (total := _sum_of(node, makers)) is not None}
    if not squares:
        return graph
    sums: dict[Node, tuple[Value, Value]] = {}
    nodes: list[Node | LayoutAgnostic] = []
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


def _sum_of(node: Node | LayoutAgnostic, makers: dict[Value, Node | LayoutAgnostic]) -> Reduction | None:
    """The column sum whose mean is in ``node``'s sum of squared differences; ``None`` for other nodes."""
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
    return total if is_of_x and same_shape(*extents) else None


def _is_column_sum(node: Node | LayoutAgnostic | None) -> bool:
    is_sum = type(node) is Reduction and node.op == "sum" and node.out.dtype == node.operand.dtype == "float32"
    return is_sum and same(node.outer, 1) and not same(node.inner, 1)


def _is_half(node: Node | LayoutAgnostic | None) -> bool:
    """Whether a node casts a half type to float32."""
    if type(node) is not Pointwise or node.op != "astype" or node.out.dtype != "float32":
        return False
    return node.operands[0].dtype in ("float16", "bfloat16")


def _is_row(mean: Operand, node: Reduction) -> bool:
    """Whether an operand is one number per column, broadcast over the rows."""
    wanted = (node.reduced, 0), (node.inner, 1)
    found = merged(mean.view)
    is_all = same(mean.value.numel, node.inner) and same(mean.view.offset, 0)
    return is_all and len(found) == len(wanted) and all(map(same_shape, found, wanted))


def _maker(operand: Operand | Scalar, makers: dict[Value, Node | LayoutAgnostic]) -> Node | LayoutAgnostic | None:
    return makers.get(operand.value) if isinstance(operand, Operand) and operand.is_whole else None


def _behind_views(
    node: Node | LayoutAgnostic | None, makers: dict[Value, Node | LayoutAgnostic]
) -> Node | LayoutAgnostic | None:
    """The node before reshapes."""
    while isinstance(node, Shaped) and node.function is reshape and node.operand.is_whole:
        node = makers.get(node.operand.value)
    return node


def _both_sums(node: Reduction) -> list[Node]:
    """The columns' sums and sums of squares, in float64, and the sums in float32."""
    x = node.operand
    wide = Pointwise("astype", (x,), Value(f"{x.value.name}_wide", x.shape, _WIDE))
    square = Pointwise("multiply", (whole(wide.out),) * 2, Value(f"{x.value.name}_squares", x.shape, _WIDE))
    sums = [
        replace(node, operand=whole(each.out), out=Value(f"{node.out.name}_{name}", node.out.shape, _WIDE))
        for each, name in ((wide, "wide"), (square, "squares"))
    ]
    return [wide, sums[0], square, sums[1], Pointwise("astype", (whole(sums[0].out),), node.out)]


def _from_sums(node: Reduction, total: Value, squares: Value) -> list[Node]:
    """``squares - total * total / count``, at least 0: rounding may make it negative."""
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


_AS_FLOAT32 = 2.0**-24
"""Relative tolerance of a constant, as a float32."""


def name_normal_functions(graph: Graph, rules: Rules) -> Graph:
    """Replaces the arithmetic of the normal distribution by ``normal_cdf`` and ``gaussian``, before layouts."""
    makers: dict[Value, Pointwise] = {}
    nodes: list[Node | LayoutAgnostic] = []
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
    return None if x is None or not _is_half(makers.get(x.value)) else replace(node, op="normal_cdf", operands=(x,))


def _gaussian(node: Pointwise, makers: dict[Value, Pointwise]) -> Pointwise | None:
    scaled = makers.get(_value(node.operands[0])) if node.op == "exp" else None
    square = None if scaled is None else _other(scaled, "multiply", -0.5, makers)
    if square is None or square.op != "multiply" or square.operands[0] != square.operands[1]:
        return None
    (x, _) = square.operands
    is_half = isinstance(x, Operand) and x.is_whole and _is_half(makers.get(x.value))
    return replace(node, op="gaussian", operands=(x,)) if is_half else None


def _other(node: Pointwise, op: str, number: float, makers: dict[Value, Pointwise]) -> Pointwise | None:
    """The producer of a commutative operator's other operand, next to a constant."""
    operand = _beside(node, op, number)
    return None if operand is None else makers.get(operand.value)


def _beside(node: Pointwise, op: str, number: float) -> Operand | None:
    """The whole operand next to a constant of a commutative operator."""
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


_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INDICES = ("int32", "int64")


def generate_lookups(graph: Graph, rules: Rules) -> Graph:
    """Computes lookups and their gradients by kernels of the backend.

    For a dynamic length, the sample's decides whether indices are sorted first.

    Safe: rows are copied; an element of a gradient is the same sum, rounded once, in the same order in every run.
    """
    placed = Placed()
    for node in graph.nodes:
        made = _generated_lookup(node, placed, rules) if isinstance(node, LibraryCall) else None
        placed.nodes.append(node if made is None else made)
    return replace(graph, nodes=placed.nodes)


def _generated_lookup(node: LibraryCall, placed: Placed, rules: Rules) -> KernelCall | None:
    """The kernel call in place of a library call, operands placed; ``None``: keep the library call."""
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


def _call(node: LibraryCall, operands: Sequence[Operand], outs: Sequence[Value], kernel: PrimFunc) -> KernelCall:
    """A kernel in place of a library call; a dynamic number of indices is a launch argument."""
    length = node.operands[1].view.numel
    scalars = (length,) if isinstance(length, Extent) else ()
    return KernelCall(f"library.{node.name}", tuple(operands), tuple(outs), kernel, scalars)


def _number(length: Dim) -> int | Argument:
    return Argument(0) if isinstance(length, Extent) else length


def _lookup(node: LibraryCall) -> LookupPlan | None:
    """The plan of a row lookup in a whole table of static size; ``None`` for other calls."""
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
    """The plan of a sum of rows into a zero table of static size; ``None`` for other calls."""
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


_NAME = "max_pool_last_backward"
_TO_FRONT = (0, 3, 1, 2)
_MOST_WINDOWS = 16
"""The maximum number of windows per element, which a kernel's thread unrolls."""


def generate_pool_gradients(graph: Graph, rules: Rules) -> Graph:
    """Computes gradients of channels_last max pools by kernels of the backend.

    Safe: the kernel adds the same gradients in eager's order.
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
    return None if kernel is None else KernelCall(f"library.{_NAME}", tuple(map(whole, values)), node.outs, kernel)


def _as_it_lies(operand: Operand) -> Value | None:
    """The value of an NCHW operand that is stored as dense NHWC; ``None`` for other layouts."""
    shape = tuple(operand.shape[axis] for axis in (0, 2, 3, 1))
    seen, wanted = operand.view, permute(dense(shape), _TO_FRONT)
    is_all = math.prod(shape) == operand.value.numel and seen.offset == wanted.offset
    return operand.value if is_all and same_shape(seen.strides, wanted.strides) else None
