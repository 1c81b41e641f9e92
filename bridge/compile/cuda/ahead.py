"""Reads ahead: what a later pass reads alike in all rows → read in the first pass, beside the row itself.

A norm's weight is asked for while the row is on its way, not once its statistics are there: each wait for memory is
some hundred cycles, in which the threads of a few rows have nothing else to do.
"""

from __future__ import annotations

from collections.abc import Iterable

from autodiff.ir import itemsize
from bridge.compile.schedule.row_plan import Made, Read, RowPlan

__all__ = ["first_pass", "reads_ahead"]

_MOST_BYTES = 256
"""That a thread keeps for later passes at most: 64 registers."""


def first_pass(plan: RowPlan) -> int:
    """The index of the first pass in which something is done."""
    return next(index for index, each in enumerate(plan.passes) if each)


def reads_ahead(plan: RowPlan, kept: int | None) -> list[Read]:
    """Vectors to read in the first pass; none where rows are walked for sums of columns, and keep what is alike.

    Args:
        kept: elements of a row that a thread meets; ``None``: nobody knows.
    """
    if kept is None or plan.column_reductions or any(plan.concats):
        return []
    first = first_pass(plan)
    now = _reads(plan, first)
    later = dict.fromkeys(read for index in range(first + 1, len(plan.passes)) for read in _reads(plan, index))
    found = [read for read in later if read not in now and _is_vector_of_all_rows(read)]
    return found if sum(kept * itemsize(plan.dtype(read)) for read in found) <= _MOST_BYTES else []


def _is_vector_of_all_rows(read: Read) -> bool:
    access = read.access
    return not access.terms and any(access.columns) and access.columns[-1] == 1


def _reads(plan: RowPlan, index: int) -> list[Read]:
    """What a pass reads to compute elements, in order."""
    row_pass = plan.passes[index]
    if not row_pass:
        return []
    kept = {*plan.cached, *plan.outputs}
    reads: dict[Read, None] = {}
    seen: set[int] = set()

    def visit(operands: Iterable[object]) -> None:
        for operand in operands:
            if isinstance(operand, Read):
                reads[operand] = None
            elif isinstance(operand, Made):
                compute(operand.node)

    def compute(node: int) -> None:
        is_there = plan.nodes[node].per_row or (plan.levels[node] < index and node in kept)
        if node not in seen and not is_there:
            seen.add(node)
            visit(plan.nodes[node].operands)

    for node in (*row_pass.stores, *row_pass.cached):
        compute(node)
    for node in row_pass.reductions:
        visit(plan.nodes[node].operands)
    return list(reads)
