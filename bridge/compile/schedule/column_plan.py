"""Column plan: a reduction over few rows, alone in its kernel → how its columns are walked, as plain data.

The order of the additions is that of :mod:`bridge.compile.schedule.order` with one chunk: row after row. A plan
holds the columns and the steps along them; the number of rows and the strides between them are launch arguments, as in
:mod:`bridge.compile.schedule.row_plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autodiff.extents import same, sample_of
from bridge.compile.loop_ir.access import Argument, Number, Term
from bridge.compile.loop_ir.graph import Reduction
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.access import Arguments, column_strides, offset_of, terms_of, window
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.planned import Planned
from bridge.compile.schedule.space import make_space

__all__ = ["ColumnPlan", "Section", "plan_columns"]


@dataclass(frozen=True)
class Section:
    """``count`` blocks of ``copies`` vectors of so many lanes, from column ``begin`` on; a task each."""

    lanes: int
    copies: int
    begin: Number
    count: Number


@dataclass(frozen=True)
class ColumnPlan:
    """How one column reduction is walked.

    Attributes:
        op: sum, prod, max, min.
        source, target: element types.
        offset, by_batch, by_row, steps: index of the source's element: offset, terms of the batch, terms of the row
            within it, stride for each loop inside a row.
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
    offset: Number
    by_batch: tuple[Term, ...]
    by_row: tuple[Term, ...]
    steps: tuple[Number, ...]
    batches: Number
    rows: Number
    columns: tuple[Number, ...]
    length: Number
    sections: tuple[Section, ...]
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
    lanes, vectors = rules.order.lanes, rules.limits.column_vectors
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
        offset_of(node.operand, key, arguments),
        by_batch,
        by_row,
        column_strides(space, steps, key, arguments),
        1 if same(outer, 1) else arguments.add(outer, "batches"),
        arguments.add(reduced, "rows"),
        tuple(arguments.known(extent, ("column extent", axis)) for axis, extent in enumerate(space.columns)),
        arguments.known(inner, "columns"),
        tuple(
            Section(*form, arguments.known(begin, ("begin", form)), arguments.known(count, ("count", form)))
            for form, begin, count in sections
            if not same(count, 0)
        ),
        not same(inner * outer, 1) and arguments.reaches(view.numel, rules.limits.parallel_columns, "parallel"),
        "int64" if max(sample_of(value.numel), sample_of(node.out.numel)) >= 2**31 else "int32",
        len(arguments.numbers),
        rules.order.block_rows,
    )
    return Planned(plan, (value,), (node.out,), (), tuple(arguments.numbers), (node.op,))
