"""Element kernels: row plans without reductions → a thread for each vector, and for each element behind them.

Several plans share a launch: the first blocks are the first plan's, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx import Bind, Expr, IfThenElse, Stmt, Var

from bridge.compile.codegen.tir import LaunchArguments, sequence
from bridge.compile.cuda.emitter import CudaEmitter
from bridge.compile.cuda.launch import launch, portions
from bridge.compile.cuda.limits import ROWS_THREADS, WARP
from bridge.compile.cuda.scope import ThreadScope
from bridge.compile.cuda.steps import column_steps
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["elements"]

_LONG = 8
"""Rows of as many warps' vectors: in such, the threads of a warp take neighbours at once where a vector is less than an
access, and the last warp of a row is the only one that may have nothing to do."""

Part = tuple[RowPlan, KernelBuffers, LaunchArguments]
"""A plan, its memory and its integers."""


def elements(parts: Sequence[Part]) -> list[Stmt]:
    """The launch of all elements of all plans."""
    works = [_work(*part) for part in parts]
    number = parts[0][2]
    ends: list[Var] = []
    stmts: list[Stmt] = []
    blocks: Expr = number(0)
    for count, _ in works:
        blocks = blocks + portions(count, ROWS_THREADS) if stmts else portions(count, ROWS_THREADS)
        ends.append(Var(f"end{len(ends)}", number.index_type))
        stmts.append(Bind(ends[-1], blocks))
        blocks = ends[-1]

    def body(block: Var, _: Var, thread: Var) -> Stmt:
        chosen = None
        for index in reversed(range(len(works))):
            own = block - ends[index - 1] if index else block
            here = works[index][1](own, thread)
            chosen = here if chosen is None else IfThenElse(block < ends[index], here, chosen)
        return chosen

    if len(works) == 1:
        return [launch(portions(works[0][0], ROWS_THREADS), ROWS_THREADS, 1, body)]
    return [*stmts, launch(blocks, ROWS_THREADS, 1, body)]


def _work(plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments) -> tuple[Expr, Callable[[Expr, Expr], Stmt]]:
    """How many threads a plan's elements take, and what a thread of a block of its own does."""
    walk, last = plan.walk, plan.columns[-1]
    if walk.vectors is not None:  # the elements of a flat space are one row
        vectors = number(walk.vectors)
        count = vectors if walk.tail is None else vectors + number(walk.tail[1])
    else:
        lanes = math.gcd(last, plan.lanes) if isinstance(last, int) else 1
        known = isinstance(plan.length, int)
        several = plan.lanes // lanes if known and not any(plan.concats) else 1
        taken = lanes * several
        apart = WARP if known and several > 1 and plan.length >= _LONG * WARP * taken else 1
        turns = (
            number(-(-plan.length // (taken * apart)) * apart)
            if known
            else tirx.truncdiv(number(plan.length), number(lanes))
        )
        count = number(walk.rows) * turns

    def row_of(index: Expr) -> Stmt:
        row, at = tirx.truncdiv(index, turns), tirx.truncmod(index, turns)
        if apart == 1:
            return _vector(plan, buffers, number, row, at * number(taken), lanes, several)
        first, thread = tirx.truncdiv(at, number(apart)), tirx.truncmod(at, number(apart))
        position = first * number(taken * apart) + thread * number(lanes)
        return _vector(plan, buffers, number, row, position, lanes, several, lanes * apart)

    def body(block: Expr, thread: Expr) -> Stmt:
        first = block * number(ROWS_THREADS)
        index = first + thread
        if walk.vectors is None:
            inside = row_of(index)
        else:
            inside = _vector(plan, buffers, number, number(0), index * number(plan.lanes), plan.lanes)
            if walk.tail is not None:
                begin = number(walk.tail[0]) + (index - vectors)
                inside = IfThenElse(index < vectors, inside, _vector(plan, buffers, number, number(0), begin, 1))
        return IfThenElse(thread < count - first, inside, None)

    return count, body


def _vector(
    plan: RowPlan,
    buffers: KernelBuffers,
    number: LaunchArguments,
    row: Expr,
    position: Expr,
    lanes: int,
    count: int = 1,
    apart: int | None = None,
) -> Stmt:
    """A vector of a row; ``count`` of them, as far as there are any: what they share of the row is read once.

    ``apart``: elements from one to the next; ``None``: they are neighbours.
    """
    apart = lanes if apart is None else apart
    scope = ThreadScope(plan, buffers, number, tirx.EQ(position, number(0)))
    scope.start(row)
    position = scope.head.name_index(position, "position")
    scope.leads = tirx.EQ(position, number(0))
    scope.per_row_values(0)
    stmts = scope.taken()
    steps = [_step(scope, position, lanes, apart * place) for place in range(count)]
    stmts += scope.taken()
    if count == 1 or (apart == lanes and plan.length % (lanes * count) == 0):
        return sequence([*stmts, *(stmt for step in steps for stmt in step)])
    left = number(plan.length) - position
    some = [IfThenElse(number(apart * place) < left, sequence(step), None) for place, step in enumerate(steps)]
    every = sequence([stmt for place in range(count) for stmt in _step(scope, position, lanes, apart * place)])
    # all of them in straight lines, where no load waits for the one before
    return sequence([*stmts, IfThenElse(number(apart * (count - 1)) < left, every, sequence(some))])


def _step(scope: ThreadScope, position: Expr, lanes: int, behind: int) -> list[Stmt]:
    """The vector that begins so many elements behind the first."""
    e, number = CudaEmitter(), scope.number
    at = position if behind == 0 else e.name_index(position + number(behind), "position")
    return [*e.stmts, *column_steps(scope, 0, lanes, at, number(0), {})]
