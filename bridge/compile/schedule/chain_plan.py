"""Plans as data: a chain of two products, a reduction over columns, a call that has several forms.

Calls of library functions that have several forms: what their time depends on, as plain data.
A form is another function of :mod:`bridge.library`, of the same arguments, that gives the same results to rounding.

Chain plan: a product, the row group that alone reads it and the product that alone reads that → one kernel, as data.
An attention's scores are written and read three times where each step is a kernel, and are too large for the caches
near a core. A chain's kernel makes some rows of them at a time, which no other kernel sees.

Column plan: a reduction over few rows, alone in its kernel → how its columns are walked, as plain data.
The order of the additions is that of :mod:`bridge.compile.schedule.order` with one chunk: row after row. A plan
holds the columns and the steps along them; the number of rows and the strides between them are launch arguments, as in
:mod:`bridge.compile.schedule.row_plan`.

Product policy: what a backend decides about matrix products; layout choice asks it, the backend implements it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autodiff.extents import Dim, same, sample_of
from bridge.compile.loop_ir.graph import LibraryCall, LoopCall, Pointwise, Product, Reduction, Value
from bridge.compile.loop_ir.operations import Argument, Geometry, Number, Packing, Term
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.access import Arguments, column_strides, make_space, offset_of, terms_of, window
from bridge.compile.schedule.fuse import Group
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.plan_rows import Planned, plan_rows
from bridge.compile.schedule.row_plan import RowPlan
from bridge.library import FORMS, TensorAt

__all__ = ["BY_ROWS", "CHAINED", "CHAIN_FIELDS", "GENERATED", "IN_PANELS", "PACKED", "CallShape", "ChainPlan"]
__all__ += ["ColumnPlan", "ColumnSection", "LayoutClass", "ProductPolicy", "ProductShape", "find_chains"]
__all__ += ["is_generated", "is_in_panels", "plan_chain", "plan_columns"]


GENERATED = "generated"
"""First word of the ways that are generated code; every other way is a kernel of :data:`bridge.library.OUT_KERNELS`."""

PACKED = "packed"
"""The way of a library's product whose second factor is a constant, laid out once for its kernels."""

IN_PANELS = f"{GENERATED} in panels"
"""Generated code that finds ``b`` packed: of products whose ``b`` is the same in every step of a loop, or a constant.
The bits are those of the other generated ways."""

BY_ROWS = f"{IN_PANELS} by rows"
"""The same, each thread with rows of its own, as many as it has of the kernels around the product: in a loop it reads
what it wrote itself. All threads read all panels."""

CHAINED = f"{GENERATED} in a chain"
"""Generated code for both products of a chain (:mod:`bridge.compile.schedule.chain_plan`); the bits are those of the
other generated ways. A policy does not choose it: the chain's steps are measured together."""


def is_in_panels(way: str) -> bool:
    """Whether a way is generated code that finds ``b`` packed."""
    return way.startswith(IN_PANELS)


def is_generated(way: str) -> bool:
    """Whether a way is generated code."""
    return way.startswith(GENERATED)


@dataclass(frozen=True)
class LayoutClass:
    """How an operand lies in memory.

    Attributes:
        unit: the dimension whose neighbours are neighbours in memory: ``"row"`` (along a row), ``"column"``, or
            ``"none"``.
        copied: whether a library's kernel needs a dense copy of it first.
        constant: whether it is a dense matrix, or the transpose of one, that is the same at each call.
        lasting: whether it is the same in every step of a loop, so that it can be packed before.
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
    """``batch`` products of ``[m, k]`` and ``[k, n]`` matrices of one element type. Numbers where a way is chosen."""

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


class ProductPolicy(Protocol):
    """A backend's choices for matrix products.

    The way of a product decides its bits. So it depends on the product's shape and on nothing else, for as long as the
    process lives: a value that a backward computes again has the forward's bits.

    Attributes:
        keeps_order: whether a library's copies of batches keep neighbours in memory neighbours, and its results are
            stored in the order that readers want; otherwise they are in the logical order.
        joins: whether small products of gradients had better be joined: see :mod:`bridge.compile.passes.join_products`.
        widened: element types of which a library's product can have a float32 result.
        packs: whether it makes a difference that an operand is the same in every step of a loop.
        chains: whether generated products may be joined with the rows between them.
        turns: whether a product of every step is as good of a transposed weight as of a copy that is made of it first.
    """

    keeps_order: bool
    joins: bool
    widened: frozenset[str]
    packs: bool
    turns: bool
    chains: bool

    def choose(self, product: ProductShape) -> str:
        """The way to compute a product: the name of a library kernel, or :data:`GENERATED` and a blocking."""

    def made(self) -> tuple[tuple, ...]:
        """The choices that this object was asked for and that another process may make otherwise, as plain data."""

    def met(self) -> tuple[tuple[ProductShape, str], ...]:
        """The classes of products that this object was asked for, with their ways; those that :meth:`made` leaves out,
        because every process makes them so, included."""

    def adopt(self, choices: Sequence[Sequence]) -> bool:
        """Makes choices of another process, from :meth:`made`, this one's; whether none of them contradicts its own."""

    def block(self, way: str, product: ProductShape) -> tuple[Dim, Dim]:
        """Rows and columns of the result that one task of a generated way computes; changes no bit.

        Of extents, whose arithmetic must not guard.
        """

    def parts(self, product: ProductShape, is_step: bool = False, is_carried: bool = False) -> int:
        """Of the inner axis, that a product had better be the sum of.

        Args:
            is_step: in a step of a loop; ``is_carried``: the next step adds them up.
        """

    def unit(self, product: ProductShape) -> int:
        """Numbers of which a product's extents along memory had better be multiples; 1: any will do. Of a sample."""

    def seconds_of_chain(self, make: Callable[[], Mapping[str, Callable[[], object]]]) -> Mapping[str, float]:
        """Seconds of functions that compute the same chain, which ``make`` makes."""

    def packing(self, way: str, product: ProductShape) -> Packing | None:
        """How a way's ``b`` is packed before; ``None`` where it is not."""


@dataclass(frozen=True)
class CallShape:
    """A class of calls.

    Attributes:
        name: of the function.
        operands: element type, extents and strides of each tensor.
        arguments: in order: numbers, lists of them, and ``"#0"``, ``"#1"``, … for the tensors.
    """

    name: str
    operands: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    arguments: tuple

    @classmethod
    def of(cls, call: object) -> CallShape | None:
        """``None`` for a node that is no such call, or whose sizes vary."""
        if not isinstance(call, LibraryCall) or isinstance(call, LoopCall) or call.name not in FORMS:
            return None
        operands = tuple((each.dtype, tuple(each.view.shape), tuple(each.view.strides)) for each in call.operands)
        arguments = tuple(str(each) if isinstance(each, TensorAt) else each for each in call.attrs)
        numbers = [number for _, *sizes in operands for size in sizes for number in size]
        numbers += [number for each in arguments for number in (each if isinstance(each, tuple) else (each,))]
        return cls(call.name, operands, arguments) if all(isinstance(each, int | str) for each in numbers) else None

    def __str__(self) -> str:
        sizes = " x ".join("x".join(map(str, shape)) for _, shape, _ in self.operands)
        return f"{self.name} {sizes} {self.arguments[len(self.operands) :]}"


CHAIN_FIELDS = (
    *("outer", "inner", "m", "block_rows"),
    *("a_outer", "a_inner", "a_row", "a_column"),
    *("b_outer", "b_inner", "b_row", "b_column"),
    *("next_outer", "next_inner", "next_row", "next_column"),
    *("c_outer", "c_inner", "c_row"),
)
"""The first integers of a launch: ``c[o, i] = rows(a[o, i] @ b[o, i]) @ next[o, i]``, as in
:data:`~bridge.compile.loop_ir.operations.FIELDS`. The row plan's own follow."""


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


@dataclass(frozen=True)
class ColumnSection:
    """``count`` blocks of ``copies`` vectors of so many lanes, from column ``begin`` on; a task each."""

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
    """How one column reduction is walked.

    Attributes:
        op: sum, prod, max, min.
        source, target: element types.
        element: where the source's elements lie.
        batches, rows: extents; ``block_rows``: see :class:`~bridge.compile.schedule.order.ReductionOrder`.
        columns: loop extents inside a row.
        length: elements of a row.
        sections: what the columns are cut into.
        parallel: whether blocks are worth starting threads for; an argument, 0 if not, where a launch's sizes decide.
        index_type: the integer type that reaches every element.
        arguments: how many integers a launch passes.
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
    """``out[b, k] = op over r of operand[b, r, k]``, the rows in order."""
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
