"""Plans as data: a chain of two products, a reduction over columns, a library call with variants.

Library calls with variants: the properties that their time depends on, as plain data. A variant is another function of
:mod:`bridge.library` with the same arguments, and the same results up to rounding.

Chain plan: a product, the row group that alone reads it and the product that alone reads that → one kernel, as data.
With one kernel per step, an attention's scores are written and read three times, and are too large for a core's caches.
A chain's kernel makes some rows of scores at a time, which no other kernel sees.

Column plan: a reduction over few rows, alone in its kernel → the loops over its columns, as plain data. The order of
the additions is that of :mod:`bridge.compile.schedule.order` with one chunk: row after row. A plan holds the columns
and the steps along them; the number of rows and the strides between rows are launch arguments, as in
:mod:`bridge.compile.schedule.row_plan`.

Product policy: a backend's decisions about matrix products; layout choice asks it, the backend implements it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autodiff.extents import Dim, same, sample_of
from bridge.artifact import written
from bridge.compile.loop_ir.graph import Pointwise, Product, Reduction, Value
from bridge.compile.loop_ir.operations import Argument, Geometry, Number, Packing, Term
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.access import Arguments, column_strides, make_space, offset_of, terms_of, window
from bridge.compile.schedule.fuse import Group
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.plan_rows import Planned, plan_rows
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["BY_ROWS", "CHAINED", "CHAIN_FIELDS", "GENERATED", "IN_PANELS", "PACKED", "ChainPlan"]
__all__ += ["ColumnPlan", "ColumnSection", "LayoutClass", "ProductPolicy", "ProductShape", "find_chains"]
__all__ += ["is_generated", "is_in_panels", "plan_chain", "plan_columns"]


GENERATED = "generated"
"""First word of generated algorithms; any other name is a kernel of :data:`bridge.library.OUT_KERNELS`."""

PACKED = "packed"
"""A library product with a constant second factor, packed once for its kernels."""

IN_PANELS = f"{GENERATED} in panels"
"""Generated code with a packed ``b``, which is constant or the same in every step of a loop; no bit differs."""

BY_ROWS = f"{IN_PANELS} by rows"
"""The same, each thread with the rows that it has in neighbouring kernels, and all panels: it reads its own results."""

CHAINED = f"{GENERATED} in a chain"
"""Generated code for both products of a chain (:mod:`bridge.compile.schedule.chain_plan`), with the same bits as other
generated algorithms. A policy does not choose it: the chain is timed as a whole."""


def is_in_panels(way: str) -> bool:
    """Whether an algorithm is generated code with a packed ``b``."""
    return way.startswith(IN_PANELS)


def is_generated(way: str) -> bool:
    """Whether an algorithm is generated code."""
    return way.startswith(GENERATED)


@dataclass(frozen=True)
class LayoutClass:
    """The memory layout of an operand.

    Attributes:
        unit: the dimension of stride 1: ``"row"`` (along a row), ``"column"``, or ``"none"``.
        copied: whether a library's kernel needs a dense copy first.
        constant: whether it is a dense matrix, or the transpose of one, that is the same at each call.
        lasting: whether it is the same in every step of a loop, so that it can be packed before the loop.
    """

    unit: str = "row"
    copied: bool = False
    constant: bool = False
    lasting: bool = False

    def __str__(self) -> str:
        words = [*["copied"] * self.copied, *["constant"] * self.constant, *["lasting"] * self.lasting, self.unit]
        return " ".join(words)


@dataclass(frozen=True)
class ProductShape:
    """``batch`` products ``[m, k] @ [k, n]`` of one element type. Constants where an algorithm is chosen."""

    element_type: str
    batch: Dim
    m: Dim
    n: Dim
    k: Dim
    a: LayoutClass = LayoutClass()
    b: LayoutClass = LayoutClass()

    @property
    def multiplications(self) -> Dim:
        return self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.element_type} {batch}{self.m} x {self.k} x {self.n} ({self.a}, {self.b})"


written(LayoutClass, ProductShape)


class ProductPolicy(Protocol):
    """A backend's choices for matrix products.

    The algorithm of a product decides its bits. So it depends only on the product's class, for the lifetime of the
    process: a value that a backward recomputes has the forward's bits.

    Attributes:
        keeps_order: whether a library's copies of batches keep the operands' memory order, and its results are stored
            in the order that consumers want; otherwise both are row-major.
        joins: whether to join small products of gradients, see :mod:`bridge.compile.passes.join_products`.
        widened: element types of which a library's product can have a float32 result.
        packs: whether it matters that an operand is the same in every step of a loop.
        chains: whether generated products may be fused with the rows between them.
        turns: whether a step's product with a transposed weight is as fast as with a copy made before the loop.
    """

    keeps_order: bool
    joins: bool
    widened: frozenset[str]
    packs: bool
    turns: bool
    chains: bool

    def choose(self, product: ProductShape) -> str:
        """The algorithm of a product: the name of a library kernel, or :data:`GENERATED` and a blocking."""

    def made(self) -> tuple[tuple, ...]:
        """The choices made here that another process may make otherwise, as plain data."""

    def adopt(self, choices: Sequence[Sequence]) -> bool:
        """Adopts the choices of :meth:`made` of another process; returns whether none contradicts its own."""

    def block(self, way: str, product: ProductShape) -> tuple[Dim, Dim]:
        """Rows and columns of the result that one task of a generated algorithm computes; changes no bit.

        ``product`` may have symbolic extents: the arithmetic on them must not add guards.
        """

    def parts(self, product: ProductShape, is_step: bool = False, is_carried: bool = False) -> int:
        """The number of parts of the inner axis whose partial products should be added up.

        Args:
            is_step: in a step of a loop; ``is_carried``: the next step adds up the partials.
        """

    def unit(self, product: ProductShape) -> int:
        """The unit of which a product's extents along memory should be multiples, at the sample's sizes; 1: any."""

    def seconds_of_chain(self, make: Callable[[], Mapping[str, Callable[[], object]]]) -> Mapping[str, float]:
        """Times the functions that ``make`` returns, variants of one chain: name → seconds."""

    def packing(self, way: str, product: ProductShape) -> Packing | None:
        """The packed form of an algorithm's ``b``; ``None`` if it is not packed."""


CHAIN_FIELDS = (
    *("outer", "inner", "m", "block_rows"),
    *("a_outer", "a_inner", "a_row", "a_column"),
    *("b_outer", "b_inner", "b_row", "b_column"),
    *("next_outer", "next_inner", "next_row", "next_column"),
    *("c_outer", "c_inner", "c_row"),
)
"""The first integers of a launch: ``c[o, i] = rows(a[o, i] @ b[o, i]) @ next[o, i]``, as in
:data:`~bridge.compile.loop_ir.operations.FIELDS`. The row plan's integers follow."""


@dataclass(frozen=True)
class ChainPlan:
    """The parameters of a chain's kernel; equal plans share one kernel.

    Attributes:
        element_type: of both products.
        k, n, columns: inner extent of the first product, its columns, columns of the second product.
        rows: the plan of the row operations between the products.
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
    """Last group → ``(first, rows, last)`` of each chain whose products are :data:`CHAINED`."""
    users: dict[Value, list[Group]] = {}
    for group in groups:
        for value in dict.fromkeys(operand.value for _, operand in group.reads()):
            users.setdefault(value, []).append(group)

    def reader(value: Value) -> Group | None:
        """The only group that reads a value, unless the value is a result; else ``None``."""
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
    """Whether ``other`` multiplies the group's result for the rows of ``product``, batch for batch."""
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
    """Whether a matrix has the wanted strides along all extents above 1."""
    steps = zip(strides, (*extents, 2), wanted, strict=True)
    return all(extent == 1 or stride == step for stride, extent, step in steps)


def plan_chain(groups: Sequence[Group], stored: Collection[Value], rules: Rules) -> Planned[ChainPlan] | None:
    """The plan of a chain; ``None`` if its row group does not iterate over a plain matrix.

    Inputs are ``a``, ``b``, the second ``b``, and the other operands of the rows.
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
    """Whether a plan iterates over rows of ``n`` elements, reads the scores only at its own element, and stores one."""
    if rows.columns != (n,) or rows.length != n or len(rows.outputs) != 1 or rows.nodes[rows.outputs[0]].per_row:
        return False
    if rows.walk.vectors is not None or rows.walk.tail is not None or rows.walk.batched or rows.buffer_row is not None:
        return False
    reads = [each for each in rows.reads if each.tensor == scores]
    return all(
        same(read.access.offset, 0) and read.access.columns == (1,) and read.access.terms == (Term(1, None, n),)
        for read in reads
    )


@dataclass(frozen=True)
class ColumnSection:
    """``count`` blocks of ``copies`` vectors of ``lanes`` lanes, from column ``begin`` on; one task per block."""

    lanes: int
    copies: int
    begin: Number
    count: Number


@dataclass(frozen=True)
class ColumnAccess:
    """Index of an element of a column reduction's source.

    Attributes:
        by_batch, by_row: terms of the batch, and of the row within it.
        steps: stride of each loop inside a row.
    """

    offset: Number
    by_batch: tuple[Term, ...]
    by_row: tuple[Term, ...]
    steps: tuple[Number, ...]


@dataclass(frozen=True)
class ColumnPlan:
    """The loops of one column reduction.

    Attributes:
        op: sum, prod, max, min.
        source, target: element types.
        element: the access to the source's elements.
        batches, rows: extents; ``block_rows``: see :class:`~bridge.compile.schedule.order.ReductionOrder`.
        columns: loop extents inside a row.
        length: elements of a row.
        sections: of the columns.
        parallel: whether threads pay; if the launch's sizes decide, an argument, 0 for no.
        index_type: an integer type that reaches every element.
        arguments: number of integers of a launch.
    """

    op: str
    source: str
    target: str
    element: ColumnAccess
    batches: Number
    rows: Number
    columns: tuple[Number, ...]
    length: Number
    sections: tuple[ColumnSection, ...]
    parallel: bool | Argument
    index_type: str
    arguments: int
    block_rows: int = 0


def plan_columns(node: Reduction, rules: Rules) -> Planned[ColumnPlan]:
    """The plan of ``out[b, k] = op over r of operand[b, r, k]``, the rows in order."""
    outer, reduced, inner = node.outer, node.reduced, node.inner
    view = node.operand.view
    cut = View((outer, reduced, inner), (0, 1, 0))
    space = make_space(view.numel, inner, [(view, 1), (cut, 1)], rules, reduces=False)
    if space is None:
        raise AssertionError("a column reduction without common loop extents was formed")
    arguments = Arguments()
    strides, steps = space.strides(view)
    key = window(node.operand, strides, steps)
    first = next(axis for axis in range(len(space.rows) + 1) if same(math.prod(space.rows[axis:]), reduced))
    by_batch, by_row = (
        terms_of(space.rows[loops], strides[loops], (1, inner), (name, key), arguments)
        for name, loops in (("batches", slice(first)), ("rows", slice(first, None)))
    )
    lanes, vectors = rules.order.lanes, rules.limits.rows.column_vectors
    wide = lanes * vectors
    sections = (
        ((lanes, vectors), 0, inner // wide),
        ((lanes, 1), inner - inner % wide, inner % wide // lanes),
        ((1, 1), inner - inner % lanes, inner % lanes),
    )
    value = node.operand.value
    plan = ColumnPlan(
        node.op,
        value.dtype,
        node.out.dtype,
        ColumnAccess(
            offset_of(node.operand, key, arguments), by_batch, by_row, column_strides(space, steps, key, arguments)
        ),
        1 if same(outer, 1) else arguments.add(outer, "batches"),
        arguments.add(reduced, "rows"),
        tuple(arguments.known(extent, ("column extent", axis)) for axis, extent in enumerate(space.columns)),
        arguments.known(inner, "columns"),
        tuple(
            ColumnSection(*form, arguments.known(begin, ("begin", form)), arguments.known(count, ("count", form)))
            for form, begin, count in sections
            if not same(count, 0)
        ),
        not same(inner * outer, 1) and arguments.reaches(view.numel, rules.limits.threads.parallel_columns, "parallel"),
        "int64" if max(sample_of(value.numel), sample_of(node.out.numel)) >= 2**31 else "int32",
        len(arguments.numbers),
        rules.order.block_rows,
    )
    return Planned(plan, (value,), (node.out,), (), tuple(arguments.numbers), (node.op,))
