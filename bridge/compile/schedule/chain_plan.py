"""Chain plan: a product, the row group that alone reads it and the product that alone reads that → one kernel, as data.

An attention's scores are written and read three times where each step is a kernel, and are too large for the caches
near a core. A chain's kernel makes some rows of them at a time, which no other kernel sees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autodiff.extents import Dim, same
from bridge.compile.loop_ir.access import Term
from bridge.compile.loop_ir.graph import Pointwise, Product, Reduction, Value
from bridge.compile.loop_ir.product import Geometry
from bridge.compile.schedule.fuse import Group
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.plan_rows import plan_rows
from bridge.compile.schedule.planned import Planned
from bridge.compile.schedule.products import CHAINED
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["CHAIN_FIELDS", "ChainPlan", "find_chains", "plan_chain"]

CHAIN_FIELDS = (
    *("outer", "inner", "m", "block_rows"),
    *("a_outer", "a_inner", "a_row", "a_column"),
    *("b_outer", "b_inner", "b_row", "b_column"),
    *("next_outer", "next_inner", "next_row", "next_column"),
    *("c_outer", "c_inner", "c_row"),
)
"""The first integers of a launch: ``c[o, i] = rows(a[o, i] @ b[o, i]) @ next[o, i]``, as in
:data:`~bridge.compile.loop_ir.product.FIELDS`. The row plan's own follow."""


@dataclass(frozen=True)
class ChainPlan:
    """What the kernel of a chain is made for; equal plans are one kernel.

    Attributes:
        element_type: of both products.
        k, n, columns: terms of the first product, its columns, those of the second one.
        rows: of what is between them.
        scores: the input of ``rows`` that is the first product's result; its one output is the second one's ``a``.
    """

    element_type: str
    k: int
    n: int
    columns: int
    rows: RowPlan
    scores: int

    @property
    def index_type(self) -> str:
        """See :class:`~bridge.compile.schedule.row_plan.RowPlan`."""
        return self.rows.index_type


def find_chains(groups: Sequence[Group], stored: Collection[Value], results: Collection[Value]) -> dict[Group, tuple]:
    """By its last group, each chain whose products were chosen to be in one: ``(first, rows, last)``."""
    users: dict[Value, list[Group]] = {}
    for group in groups:
        for value in dict.fromkeys(operand.value for _, operand in group.reads()):
            users.setdefault(value, []).append(group)

    def reader(value: Value) -> Group | None:
        """The one group that reads a value that is no result."""
        found = users.get(value, [])
        return found[0] if len(found) == 1 and value not in results else None

    chains = {}
    for first in groups:
        product = _chained(first)
        rows = None if product is None else reader(product.out)
        if rows is None or not rows.fusable:
            continue
        made = [value for value in rows.made if value in stored]
        last = reader(made[0]) if len(made) == 1 else None
        other = None if last is None else _chained(last)
        if other is not None and _continues(product, rows, other, made[0]):
            chains[last] = first, rows, last
    return chains


def _chained(group: Group) -> Product | None:
    node = group.nodes[0]
    return node if isinstance(node, Product) and node.plan.way == CHAINED and node.onto is None else None


def _continues(product: Product, rows: Group, other: Product, made: Value) -> bool:
    """Whether ``other`` multiplies what the group makes of a product's rows, batch for batch."""
    one, two = product.plan.geometry, other.plan.geometry
    if not all(isinstance(number, int) for each in (one, two) for number in _numbers(each)):
        return False
    if not all(isinstance(node, Pointwise) or (isinstance(node, Reduction) and node.inner == 1) for node in rows.nodes):
        return False
    outer, inner, m, n, _ = one.extents
    dense = inner * m * n, m * n, n, 1
    if two.extents[:3] != one.extents[:3] or two.extents[4] != n:
        return False
    lies = (_same_steps(strides, one.extents[:3], dense) for strides in (one.c, two.a))
    types = {product.plan.element_type, other.plan.element_type, product.out.dtype, made.dtype}
    alone = other.operands[0].value is made and other.operands[1].value is not made and two.a_offset == 0
    return all(lies) and len(types) == 1 and alone and product.out.numel == made.numel == outer * inner * m * n


def _numbers(geometry: Geometry) -> tuple[Dim, ...]:
    return (*geometry.extents, *geometry.a, *geometry.b, *geometry.c, geometry.a_offset, geometry.b_offset)


def _same_steps(strides: Sequence[int], extents: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a matrix's steps are the wanted ones, where an extent is more than 1."""
    steps = zip(strides, (*extents, 2), wanted, strict=True)
    return all(extent == 1 or stride == step for stride, extent, step in steps)


def plan_chain(groups: Sequence[Group], stored: Collection[Value], rules: Rules) -> Planned[ChainPlan] | None:
    """The plan of a chain; ``None`` if its rows are not walked as those of a matrix.

    Inputs are ``a``, ``b``, the second ``b``, and what else the rows read.
    """
    first, between, last = groups
    (product,), (other,) = first.nodes, last.nodes
    planned, n = plan_rows(between, stored, rules), product.plan.geometry.extents[3]
    rows = planned.plan
    scores = planned.inputs.index(product.out)
    if not _is_plain(rows, scores, n):
        return None
    one, two = product.plan.geometry, other.plan.geometry
    plan = ChainPlan(product.plan.element_type, one.extents[4], n, two.extents[3], rows, scores)
    fields = (*one.extents[:3], product.plan.block[0], *one.a, *one.b, *two.b, *two.c[:3])
    assert len(fields) == len(CHAIN_FIELDS)
    others = [value for value in planned.inputs if value is not product.out]
    inputs = *(operand.value for operand in (*product.operands[:2], other.operands[1])), *others
    ops = "matmul", *planned.ops, "matmul"
    return Planned(plan, inputs, other.outs, (), (*fields, *planned.scalars), ops)


def _is_plain(rows: RowPlan, scores: int, n: int) -> bool:
    """Whether a plan walks rows of ``n`` elements, reads the scores only where they lie and makes one element of
    each."""
    if rows.columns != (n,) or rows.length != n or len(rows.outputs) != 1 or rows.nodes[rows.outputs[0]].per_row:
        return False
    if rows.walk.vectors is not None or rows.walk.tail is not None or rows.walk.batched or rows.buffer_row is not None:
        return False
    reads = [each for each in rows.reads if each.tensor == scores]
    return all(
        same(read.access.offset, 0) and read.access.columns == (1,) and read.access.terms == (Term(1, None, n),)
        for read in reads
    )
