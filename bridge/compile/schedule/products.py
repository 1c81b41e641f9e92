"""Reductions over columns as data; the policy for matrix products.

Column plan: a reduction over few rows, alone in its kernel → the loops over its columns, as plain data. The order of
the additions is that of :mod:`bridge.compile.schedule.order` with one chunk: row after row. A plan holds the columns
and the steps along them; the number of rows and the strides between rows are launch arguments, as in
:mod:`bridge.compile.schedule.row_plan`.

Product policy: a backend's decisions about matrix products; layout choice asks it, the backend implements it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from autodiff.extents import Dim, same, sample_of
from bridge.artifact import written
from bridge.compile.loop_ir.graph import Reduction
from bridge.compile.loop_ir.operations import Argument, Number, Packing, Term
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.access import Arguments, column_strides, make_space, offset_of, terms_of, window
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.plan_rows import Planned

__all__ = ["BY_ROWS", "GENERATED", "IN_PANELS", "ColumnPlan", "ColumnSection", "LayoutClass", "ProductPolicy"]
__all__ += ["ProductShape", "is_generated", "is_in_panels", "plan_columns"]


GENERATED = "generated"
"""First word of generated algorithms; any other name is a kernel of :data:`bridge.library.OUT_KERNELS`."""

IN_PANELS = f"{GENERATED} in panels"
"""Generated code with a packed ``b``, which is constant or the same in every step of a loop; no bit differs."""

BY_ROWS = f"{IN_PANELS} by rows"
"""The same, each thread with the rows that it has in neighbouring kernels, and all panels: it reads its own results."""


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


class ProductPolicy(ABC):
    """A backend's choices for matrix products; by default none is made here, and a product stays one.

    The algorithm of a product decides its bits. So it depends only on the product's class, for the lifetime of the
    process: a value that a backward recomputes has the forward's bits.

    Attributes:
        keeps_order: whether a library's copies of batches keep the operands' memory order, and its results are stored
            in the order that consumers want; otherwise both are row-major.
        packs: whether it matters that an operand is the same in every step of a loop.
        turns: whether a step's product with a transposed weight is as fast as with a copy made before the loop.
    """

    keeps_order = False
    packs = False
    turns = True

    @abstractmethod
    def choose(self, product: ProductShape) -> str:
        """The algorithm of a product: the name of a library kernel, or :data:`GENERATED` and a blocking."""

    def made(self) -> tuple[tuple, ...]:
        """The choices made here that another process may make otherwise, as plain data."""
        return ()

    def adopt(self, choices: Sequence[Sequence]) -> bool:
        """Adopts the choices of :meth:`made` of another process; returns whether none contradicts its own."""
        return not choices

    @abstractmethod
    def block(self, way: str, product: ProductShape) -> tuple[Dim, Dim]:
        """Rows and columns of the result that one task of a generated algorithm computes; changes no bit.

        ``product`` may have symbolic extents: the arithmetic on them must not add guards.
        """

    def unit(self, product: ProductShape) -> int:
        """The unit of which a product's extents along memory should be multiples, at the sample's sizes; 1: any."""
        return 1

    def packing(self, way: str, product: ProductShape) -> Packing | None:
        """The packed form of an algorithm's ``b``; ``None`` if it is not packed."""
        return None


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
