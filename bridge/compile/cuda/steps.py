"""Steps of a pass at a position of the row: coordinates in the loops over the columns, sections that it is in."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Buffer, Expr, IfThenElse, Stmt

from bridge.compile.codegen.tir import sequence
from bridge.compile.cuda.emitter import CudaEmitter
from bridge.compile.cuda.scope import ThreadScope
from bridge.compile.cuda.step import Step

__all__ = ["column_steps"]


def column_steps(
    scope: ThreadScope, index: int, lanes: int, position: Expr, slot: Expr, accumulators: dict[int, Buffer]
) -> list[Stmt]:
    """Statements of pass ``index`` for one vector; per-row loads that it asks for are the head's."""
    coordinates, e = _coordinates(scope, position)

    def inside(at: list[Expr], sections: list[int | None]) -> list[Stmt]:
        axis = len(at)
        if axis == len(coordinates):
            step = Step(scope, index, lanes, position, slot, at, sections, accumulators)
            return step.emit(scope.plan.passes[index])
        if axis == len(coordinates) - 1 or not scope.unrolled(axis):
            return inside([*at, coordinates[axis]], [*sections, None])
        chosen: Stmt | None = None
        for k in reversed(range(scope.plan.columns[axis])):
            here = sequence(inside([*at, scope.number(k)], [*sections, k]))
            chosen = here if chosen is None else IfThenElse(tirx.EQ(coordinates[axis], scope.number(k)), here, chosen)
        return [chosen]

    body = inside([], [])
    return [*e.stmts, *body]


def _coordinates(scope: ThreadScope, position: Expr) -> tuple[list[Expr], CudaEmitter]:
    """The coordinate in each loop over the columns, and what names them."""
    e, number, columns = CudaEmitter(), scope.number, scope.plan.columns
    found: list[Expr] = []
    for axis in reversed(range(1, len(columns))):
        extent = number(columns[axis])
        found.append(e.name_index(tirx.truncmod(position, extent), f"c{axis}"))
        position = e.name_index(tirx.truncdiv(position, extent), "outer")
    return [position, *reversed(found)], e
