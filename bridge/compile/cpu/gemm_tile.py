"""The register tile of a matrix product: packed panels → fused multiply-adds in registers → stored or added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Broadcast, BufferLoad, BufferStore, Expr, IfThenElse, SeqStmt, Stmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import Scope, const, loop
from bridge.compile.cpu.gemm_buffers import VECTORS, Buffers, smaller

__all__ = ["Strip", "multiply_tile"]


@dataclass(frozen=True)
class Strip:
    """Rows of the result that meet every packed panel.

    Attributes:
        target: index of the first element in ``c``.
        depth: terms of this chunk of ``k``.
        count: rows.
        width: columns of the block.
        onto: 1 if the products are added to what ``c`` holds, else 0.
        packed: index of the strip's rows in ``a_panel``.
        steps: there, from term to term and from row to row; ``None``: they are packed.
    """

    target: Expr
    depth: Var
    count: Var
    width: Var
    onto: Var
    packed: Expr
    steps: tuple[int, int] | None = None


def multiply_tile(g: Buffers, scope: Scope, panel: Var, strip: Strip, source: Expr) -> None:
    """The strip times one panel, from index ``source`` on, by the smallest register tile that holds the rows."""
    column = scope.name(panel * const(g.columns), "column")
    source = scope.name(source, "source")
    valid = scope.name(smaller(strip.width - column, const(g.columns)), "valid")
    target = scope.name(strip.target + column, "target")
    tiles = [_Tile(g, rows, strip, target, valid).multiply(source) for rows in g.heights]
    chosen = tiles[-1]
    for rows, stmt in reversed(list(zip(g.heights[:-1], tiles[:-1], strict=True))):
        chosen = IfThenElse(strip.count <= const(rows), stmt, chosen)
    scope.add(chosen)


class _Tile:
    """A tile of ``rows`` rows, ``valid`` of whose columns exist, at index ``target`` of ``c``."""

    def __init__(self, g: Buffers, rows: int, strip: Strip, target: Var, valid: Var) -> None:
        self.g, self.rows, self.strip, self.target, self.valid = g, rows, strip, target, valid
        self.sums, self.allocation = stack_buffer(rows * g.columns, g.dtype, f"sums{rows}")
        self.parts = [(i, vector) for i in range(rows) for vector in range(VECTORS)]

    def _part(self, i: int, vector: int) -> Expr:
        return const(i * self.g.columns + vector * self.g.lanes)

    def multiply(self, source: Var) -> Stmt:
        """The sums of a chunk of ``k``, then stored or added to the result; ``source``: the panel's index."""
        g, sums, part = self.g, self.sums, self._part
        along, down = self.strip.steps or (g.pitch, 1)
        zero = Emitter(g.lanes).const(0.0, g.dtype)
        scope = Scope()
        scope.add(self.allocation, *(g.store(sums, part(*which), zero) for which in self.parts))

        def term(body: Scope, k: Var) -> None:
            emit = Emitter(g.lanes)
            start = source + k * const(g.columns)
            b = [emit.bind(g.load(g.b_panels, start + const(v * g.lanes))) for v in range(VECTORS)]
            for i in range(self.rows):
                at = self.strip.packed + k * const(along) + const(i * down)
                a = Broadcast(emit.bind(BufferLoad(g.a_panel, [at])), g.lanes)
                for vector in range(VECTORS):
                    total = emit.fma(a, b[vector], g.load(sums, part(i, vector)))
                    emit.stmts.append(g.store(sums, part(i, vector), total))
            body.add(*emit.stmts)

        scope.add(loop(self.strip.depth, term))
        whole = tirx.And(tirx.EQ(self.strip.count, const(self.rows)), tirx.EQ(self.valid, const(g.columns)))
        spilled = [g.store(g.tile, part(*which), g.load(sums, part(*which))) for which in self.parts]
        edge = SeqStmt([*spilled, self._stored_or_added(self._store_edge)])
        scope.add(IfThenElse(whole, self._stored_or_added(self._store), edge))
        return scope.body

    def _stored_or_added(self, stmt: Callable[[bool], Stmt]) -> Stmt:
        return IfThenElse(self.strip.onto > const(0), stmt(True), stmt(False))

    def _store(self, add: bool) -> Stmt:
        """The whole tile, in vectors."""
        g, stmts = self.g, []
        for i, vector in self.parts:
            at = self.target + const(i) * g.field["c_row"] + const(vector * g.lanes)
            value = g.load(self.sums, self._part(i, vector))
            stmts.append(g.store(g.c, at, _added(g.load(g.c, at), value, add)))
        return SeqStmt(stmts)

    def _store_edge(self, add: bool) -> Stmt:
        """The part of the tile that exists, element by element."""
        g = self.g

        def line(body: Scope, i: Var) -> None:
            start = body.name(self.target + i * g.field["c_row"], "start")

            def element(innermost: Scope, j: Var) -> None:
                value = BufferLoad(g.tile, [i * const(g.columns) + j])
                at = start + j
                innermost.add(BufferStore(g.c, _added(BufferLoad(g.c, [at]), value, add), [at]))

            body.add(loop(self.valid, element))

        return loop(self.strip.count, line)


def _added(old: Expr, value: Expr, add: bool) -> Expr:
    return old + value if add else value
