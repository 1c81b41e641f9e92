"""Row emitter: a row plan → the code of one row, its passes over the columns and the reductions between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, Stmt, Var

from bridge.compile.codegen.emit import LANES, Emitter
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.codegen.rounding import rounded
from bridge.compile.codegen.tir import sequence
from bridge.compile.cpu.row_scope import RowScope
from bridge.compile.cpu.row_step import Accumulators, Step
from bridge.compile.loop_ir.graph import Reduction
from bridge.compile.schedule.reduction import combine, fold_lanes, identity, unroll
from bridge.compile.schedule.row_plan import RowPass

__all__ = ["emit_row"]


def emit_row(scope: RowScope, row: Expr) -> Stmt:
    """The code of the row of index ``row``; the buffers that it needs are in ``scope.allocations`` afterwards."""
    scope.start(row)
    stmts: list[Stmt] = []
    for index, row_pass in enumerate(scope.plan.passes):
        scope.per_row_values(index)
        stmts += _taken(scope.head)
        stmts += _pass(scope, index, row_pass)
    scope.per_row_values(len(scope.plan.passes))
    return sequence(stmts + scope.head.stmts)


def _taken(e: Emitter) -> list[Stmt]:
    """The statements emitted so far, which the emitter forgets."""
    stmts, e.stmts = e.stmts, []
    return stmts


def _pass(scope: RowScope, index: int, row_pass: RowPass) -> list[Stmt]:
    if not row_pass.roots:
        return []
    rows = [node for node in row_pass.reductions if node.inner == 1]
    last = scope.extents[-1]
    width = unroll(scope.length) if rows else 1
    # (lanes, steps per turn, first column, steps): vectors, then the scalar tail
    steps = ((LANES, width, 0, last // LANES), (1, 1, last - last % LANES, last % LANES))
    start, accumulators = _accumulators(scope, rows, steps)

    def vectors(outer: list[Expr], sections: list[int | None]) -> list[Stmt]:
        loops: list[Stmt] = []
        for lanes, copies, begin, trips in steps:
            if not trips:
                continue
            i = Var("i", scope.plan.index_type)
            body: list[Stmt] = []
            for copy in range(copies):
                at = scope.const(begin) + (i * scope.const(copies) + scope.const(copy)) * scope.const(lanes)
                body += Step(scope, index, lanes, [*outer, at], sections, accumulators, copy).emit(row_pass)
            loops.append(For(i, scope.const(0), scope.const(trips // copies), ForKind.SERIAL, sequence(body)))
        return loops

    loops = sequence(_column_loops(scope, [], [], vectors))
    hoisted = _taken(scope.head)  # per-row loads that the steps asked for
    for node in rows:
        _finish(scope, node, accumulators, width)
    return [*start, *hoisted, loops, *_taken(scope.head)]


def _accumulators(
    scope: RowScope, rows: Sequence[Reduction], steps: Sequence[tuple[int, int, int, int]]
) -> tuple[list[Stmt], Accumulators]:
    """Buffers of the row reductions, and the statements that fill them with the reductions' identities."""
    start: list[Stmt] = []
    accumulators: dict[tuple[Reduction, int], Buffer] = {}
    for node in rows:
        dtype = compute_type(node.out.dtype)
        for lanes, copies, _, trips in steps:
            if trips:
                buffer = accumulators[node, lanes] = scope.allocate(lanes * copies, dtype, "acc")
                e = Emitter(lanes)
                for copy in range(copies):
                    first = e.const(identity(node.op, dtype), dtype)
                    start.append(BufferStore(buffer, first, [e.index(scope.const(copy * lanes), 1)]))
    return start, accumulators


def _column_loops(
    scope: RowScope,
    at: list[Expr],
    sections: list[int | None],
    body: Callable[[list[Expr], list[int | None]], list[Stmt]],
) -> list[Stmt]:
    """Loops over all column extents but the last; those over the sections of a concatenation are unrolled."""
    axis = len(at)
    if axis == len(scope.extents) - 1:
        return body(at, sections)
    extent = scope.extents[axis]
    if scope.unrolled(axis):
        unrolled = []
        for k in range(extent):
            unrolled += _column_loops(scope, [*at, scope.const(k)], [*sections, k], body)
        return unrolled
    var = Var(f"c{axis}", scope.plan.index_type)
    inside = sequence(_column_loops(scope, [*at, var], [*sections, None], body))
    return [For(var, scope.const(0), scope.const(extent), ForKind.SERIAL, inside)]


def _finish(scope: RowScope, node: Reduction, accumulators: Accumulators, width: int) -> None:
    """Combines a row reduction's accumulators, in the order of :mod:`bridge.compile.schedule.reduction`."""
    head, total = scope.head, None
    if (node, LANES) in accumulators:
        e = Emitter(LANES)
        buffer = accumulators[node, LANES]
        parts = [e.bind(BufferLoad(buffer, [e.index(scope.const(k * LANES), 1)])) for k in range(width)]
        while len(parts) > 1:
            parts = [e.bind(combine(e, node.op, a, b)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        total = fold_lanes(e, node.op, parts[0])
        head.stmts += e.stmts
    if (node, 1) in accumulators:
        tail = head.bind(BufferLoad(accumulators[node, 1], [scope.const(0)]))
        total = tail if total is None else head.bind(combine(head, node.op, total, tail))
    scope.set_scalar(node.out, head.bind(rounded(head, total, node.out.dtype), "r"))
