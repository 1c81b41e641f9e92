"""Shared memory of a row kernel: its arrays, of each element type → bytes; how many groups of threads these allow.

Two things lie there: what the warps of a group have of a row's reductions, an array for each that a pass completes
(:class:`bridge.compile.cuda.tree.Team`), and what the groups have of column reductions, an array for each element type
(:class:`bridge.compile.cuda.task_parts.TaskParts`). Together they are no more than :data:`SHARED_BYTES`: with fewer
groups, a block has less of both.
"""

from __future__ import annotations

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import compute_type
from bridge.compile.cuda.limits import SHARED_BYTES, WARP
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["fitting_groups", "turns_together"]

_PARTS_BYTES = 32_768
"""In which the groups put together what they have of column reductions, where one turn does not need more."""

_ALIGNED = 64
"""An array begins at a multiple of so many bytes."""


def fitting_groups(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """``groups`` of ``threads``, or as many fewer as shared memory has room for: a power of two."""
    while groups > 1 and _exchanged(plan, threads) + _turn(plan, threads, groups, lanes) > SHARED_BYTES:
        groups //= 2
    return groups


def turns_together(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """Of how many turns the groups' parts of all column reductions have room at once."""
    room = min(_PARTS_BYTES, SHARED_BYTES - _exchanged(plan, threads))
    return max(1, room // _turn(plan, threads, groups, lanes))


def _exchanged(plan: RowPlan, threads: int) -> int:
    """Bytes for the warps' values: those of one pass make room for those of the next."""
    if threads <= WARP:
        return 0
    arrays = set()
    for row_pass in plan.passes:
        rows = [plan.nodes[node] for node in row_pass.reductions if plan.nodes[node].reduces == "row"]
        arrays |= {(index, compute_type(node.dtype)) for index, node in enumerate(rows)}
    return sum(_array(WARP, dtype) for _, dtype in arrays)


def _turn(plan: RowPlan, threads: int, groups: int, lanes: int) -> int:
    """Bytes for the groups' parts of one turn, of each element type; one group stores them as they are."""
    if groups == 1:
        return 1
    dtypes = {compute_type(plan.nodes[node].dtype) for node in plan.column_reductions}
    return max(1, sum(_array(threads * groups * lanes, dtype) for dtype in dtypes))


def _array(elements: int, dtype: str) -> int:
    return -(-elements * itemsize(dtype) // _ALIGNED) * _ALIGNED
