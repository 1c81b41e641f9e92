"""Row emitter: a row plan → the code of one row, its passes over the columns and the reductions between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, For, ForKind, IfThenElse, Stmt, Var

from bridge.compile.codegen.emit import Emitter
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.codegen.rounding import rounded
from bridge.compile.codegen.tir import sequence
from bridge.compile.cpu.row_scope import RowScope
from bridge.compile.cpu.row_step import Accumulators, Step
from bridge.compile.cpu.steps import Steps, narrowed, vectors_and_tail
from bridge.compile.schedule.reduction import combine, fold_lanes, identity
from bridge.compile.schedule.row_plan import RowPass

__all__ = ["emit_row"]


def emit_row(scope: RowScope, row: Expr) -> Stmt:
    """The code of the row of index ``row``; the buffers that it needs are in ``scope.allocations`` afterwards."""
    scope.start(row)
    stmts: list[Stmt] = []
    for index, row_pass in enumerate(scope.plan.passes):
        scope.per_row_values(index)
        stmts += _taken(scope.head)
        stmts += _pass(scope, index, row_pass) if row_pass else []
    scope.per_row_values(len(scope.plan.passes))
    return sequence(stmts + scope.head.stmts)


def _taken(e: Emitter) -> list[Stmt]:
    """The statements emitted so far, which the emitter forgets."""
    stmts, e.stmts = e.stmts, []
    return stmts


def _pass(scope: RowScope, index: int, row_pass: RowPass) -> list[Stmt]:
    rows = [node for node in row_pass.reductions if scope.plan.nodes[node].reduces == "row"]
    widths = scope.plan.accumulators if rows else (1,)
    possible, tail = _steps(scope, widths)
    start, accumulators = _accumulators(scope, rows, [*possible, *tail])

    def along(part: Steps, outer: list[Expr], sections: list[int | None]) -> Stmt:
        i = Var("i", scope.plan.index_type)
        body: list[Stmt] = []
        for copy in range(part.copies):
            at = (i * scope.number(part.copies) + scope.number(copy)) * scope.number(part.lanes)
            body += Step(scope, index, part.lanes, [*outer, part.first + at], sections, accumulators, copy).emit(
                row_pass
            )
        return For(i, scope.number(0), part.trips, ForKind.SERIAL, sequence(body))

    def vectors(outer: list[Expr], sections: list[int | None]) -> list[Stmt]:
        loops = _first_that_divides(scope, widths, [along(part, outer, sections) for part in possible])
        return [*loops, *(along(part, outer, sections) for part in tail)]

    loops = sequence(_column_loops(scope, [], [], vectors))
    hoisted = _taken(scope.head)  # per-row loads that the steps asked for
    for node in rows:
        _finish(scope, node, accumulators, max(widths))
    return [*start, *hoisted, loops, *_taken(scope.head)]


def _steps(scope: RowScope, widths: Sequence[int]) -> tuple[list[Steps], list[Steps]]:
    """Vectors, in turns of each width that is possible; the scalar tail. The last row of a flat space may have fewer
    vectors, and its tail is a row."""
    number, walk, last = scope.number, scope.plan.walk, scope.plan.columns[-1]
    wide = scope.plan.lanes
    if scope.tail:
        first, count = map(number, walk.tail)
        return [], [Steps(1, 1, first, count)]
    if walk.vectors is not None:
        vectors = number(last // wide)
        left = number(walk.vectors) - scope.row * vectors
        return [Steps(wide, 1, number(0), scope.head.name_index(tirx.min(left, vectors), "vectors"))], []
    turns, tail = vectors_and_tail(number, last, wide, widths)
    return turns, narrowed(number, last, wide, tail)


def _first_that_divides(scope: RowScope, widths: Sequence[int], loops: Sequence[Stmt]) -> list[Stmt]:
    """The loop of the first width that divides the vectors of the row, the last one if none does."""
    if len(loops) < 2:
        return list(loops)
    number = scope.number
    vectors = tirx.truncdiv(number(scope.plan.length), number(scope.plan.lanes))
    *others, chosen = loops
    for width, each in reversed(list(zip(widths, others, strict=False))):
        chosen = IfThenElse(tirx.EQ(tirx.truncmod(vectors, number(width)), number(0)), each, chosen)
    return [chosen]


def _accumulators(scope: RowScope, rows: Sequence[int], steps: Sequence[Steps]) -> tuple[list[Stmt], Accumulators]:
    """Buffers of the row reductions, and the statements that fill them with the reductions' identities."""
    start: list[Stmt] = []
    accumulators: dict[tuple[int, int], Buffer] = {}
    most: dict[int, int] = {}  # vectors of each number of lanes
    for part in steps:
        lanes = part.lanes if part.lanes == scope.plan.lanes else 1
        most[lanes] = max(part.copies, most.get(lanes, 0))
    for index in rows:
        node = scope.plan.nodes[index]
        dtype = compute_type(node.dtype)
        for lanes, copies in most.items():
            buffer = accumulators[index, lanes] = scope.allocate(lanes * copies, dtype, "acc")
            e = Emitter(lanes)
            for copy in range(copies):
                first = e.const(identity(node.op, dtype), dtype)
                start.append(BufferStore(buffer, first, [e.index(scope.number(copy * lanes), 1)]))
    return start, accumulators


def _column_loops(
    scope: RowScope,
    at: list[Expr],
    sections: list[int | None],
    body: Callable[[list[Expr], list[int | None]], list[Stmt]],
) -> list[Stmt]:
    """Loops over all column extents but the last; those over the sections of a concatenation are unrolled."""
    axis, columns = len(at), scope.plan.columns
    if axis == len(columns) - 1:
        return body(at, sections)
    if scope.unrolled(axis):
        unrolled = []
        for k in range(columns[axis]):
            unrolled += _column_loops(scope, [*at, scope.number(k)], [*sections, k], body)
        return unrolled
    var = Var(f"c{axis}", scope.plan.index_type)
    inside = sequence(_column_loops(scope, [*at, var], [*sections, None], body))
    return [For(var, scope.number(0), scope.number(columns[axis]), ForKind.SERIAL, inside)]


def _finish(scope: RowScope, index: int, accumulators: Accumulators, width: int) -> None:
    """Combines a row reduction's accumulators, in the order of :mod:`bridge.compile.schedule.order`.

    Of a row whose length is known at the launch, those that nothing was added to are identities, which change no bit: a
    sum that began with 0 is never -0.
    """
    head, node, total, lanes = scope.head, scope.plan.nodes[index], None, scope.plan.lanes
    if (index, lanes) in accumulators:
        e = Emitter(lanes)
        buffer = accumulators[index, lanes]
        parts = [e.bind(BufferLoad(buffer, [e.index(scope.number(k * lanes), 1)])) for k in range(width)]
        while len(parts) > 1:
            parts = [e.bind(combine(e, node.op, a, b)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        total = fold_lanes(e, node.op, parts[0])
        head.stmts += e.stmts
    if (index, 1) in accumulators:
        tail = head.bind(BufferLoad(accumulators[index, 1], [scope.number(0)]))
        total = tail if total is None else head.bind(combine(head, node.op, total, tail))
    scope.set_scalar(index, head.bind(rounded(head, total, node.dtype), "r"))
