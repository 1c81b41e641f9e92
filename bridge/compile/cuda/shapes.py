"""Launch shapes: a kernel's function and a launch's integers → blocks, threads and bytes of shared memory.

Launch shapes: a kernel's function and a launch's integers → how many blocks of how many threads, as text.
For people; the shapes are the function's own, evaluated as its host code does.

Shared memory of a row kernel: its arrays, of each element type → bytes; how many groups of threads these allow.
Two things lie there: what the warps of a group have of a row's reductions, an array for each that a pass completes
(:class:`bridge.compile.cuda.columns.Team`), and what the groups have of column reductions, an array for each element
type (:class:`bridge.compile.cuda.row.TaskParts`). Together they are no more than :data:`SHARED_BYTES`: with
fewer groups, a block has less of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tvm import sym, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import AttrStmt, Bind, Cast, Expr, For, IfThenElse, IntImm, PrimFunc, Stmt

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import compute_type
from bridge.compile.cuda.limits import SHARED_BYTES, WARP
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["fitting_groups", "launch_shapes", "turns_together"]


_INSIDE = ("body", "then_case", "else_case", "block")
"""Where statements hold others."""


def launch_shapes(function: PrimFunc, scalars: Sequence[int]) -> tuple[str, ...]:
    """Of each launch in order, as in ``"96 x 256 threads"``; none for one that has no blocks.

    A number that is not the launch's is written as the kernel has it.
    """
    analyzer = sym.Analyzer()
    for stmt in _statements(function.body):
        if isinstance(stmt, Bind) and (read := _read(stmt.value)) is not None:
            analyzer.bind(stmt.var, tirx.const(scalars[int(read.indices[0])], str(stmt.var.ty)))
    found = []
    for launch in _launches(function.body, analyzer):
        extents = dict(filter(None, map(_extent, _statements(launch))))
        sizes = {tag: analyzer.simplify(extent) for tag, extent in extents.items()}
        if not all(isinstance(size, IntImm) for size in sizes.values()):
            found.append(" x ".join(map(str, extents.values())))
            continue
        blocks, threads = (
            math.prod(int(size) for tag, size in sizes.items() if tag.startswith(of)) for of in ("block", "thread")
        )
        if blocks:
            found.append(f"{blocks} x {threads} threads")
    return tuple(found)


def _read(value: Expr) -> TensorLoad | None:
    """A read of the descriptor."""
    read = value.value if isinstance(value, Cast) else value
    return read if isinstance(read, TensorLoad) and getattr(read.source, "name", "") == "descriptor" else None


def _extent(stmt: Stmt) -> tuple[str, Expr] | None:
    """What a statement is bound to, and how many there are of it."""
    if isinstance(stmt, AttrStmt) and stmt.attr_key == "thread_extent":
        return str(stmt.node.thread_tag), stmt.value
    if isinstance(stmt, For) and stmt.thread_binding is not None:
        return str(stmt.thread_binding.thread_tag), stmt.extent
    return None


def _launches(stmt: Stmt, analyzer: sym.Analyzer) -> Iterator[Stmt]:
    """The outermost statements that are bound to blocks or threads, in order; of two forms the one that is taken."""
    if _extent(stmt) is not None:
        yield stmt
        return
    condition = analyzer.simplify(stmt.condition) if isinstance(stmt, IfThenElse) else None
    left_out = None
    if isinstance(condition, IntImm):
        left_out = stmt.else_case if int(condition) else stmt.then_case
    for inner in _inner(stmt):
        if inner is not left_out:
            yield from _launches(inner, analyzer)


def _statements(stmt: Stmt) -> Iterator[Stmt]:
    """A statement and all inside."""
    yield stmt
    for inner in _inner(stmt):
        yield from _statements(inner)


def _inner(stmt: Stmt) -> Iterator[Stmt]:
    yield from getattr(stmt, "seq", ())
    for name in _INSIDE:
        inner = getattr(stmt, name, None)
        if isinstance(inner, Stmt):
            yield inner


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
