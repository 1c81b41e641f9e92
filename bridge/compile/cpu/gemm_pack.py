"""Packing of a matrix product: blocks of the operands, of any strides → dense panels in the order of the inner loop.

Both operands have three ways: vectors where a line of the panel is dense in memory, squares transposed in registers
where the lines along ``k`` are, element by element otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Stmt, Var

from bridge.compile.codegen.tir import Scope, const, loop
from bridge.compile.cpu.gemm_buffers import VECTORS, Buffers, smaller
from bridge.compile.cpu.transpose import transpose

__all__ = ["pack_a", "pack_b"]


def pack_b(g: Buffers, scope: Scope, panel: Var, source: Expr, depth: Var, width: Var, target: Expr) -> None:
    """Columns of one panel: ``depth`` lines from index ``source`` of ``b`` on, of a block ``width`` columns wide, are
    put from index ``target`` on."""
    step, across = g.field["b_row"], g.field["b_column"]
    column = scope.name(panel * const(g.columns), "column")
    source = scope.name(source + column * across, "source")
    target = scope.name(target, "target")
    valid = scope.name(smaller(width - column, const(g.columns)), "valid")
    full = tirx.EQ(valid, const(g.columns))

    def vectors(body: Scope, k: Var) -> None:
        for vector in range(VECTORS):
            shift = const(vector * g.lanes)
            value = g.load(g.b, source + k * step + shift)
            body.add(g.store(g.b_panels, target + k * const(g.columns) + shift, value))

    def elements(begin: Expr) -> Stmt:
        lines = (g.b, source, step, across), (g.b_panels, lambda at: target + at * const(g.columns))
        return _elements(begin, depth, valid, *lines)

    turned = Scope()
    squares = turned.name(tirx.truncdiv(depth, const(g.lanes)), "squares")

    def square(body: Scope, index: Var) -> None:
        for vector in range(VECTORS):
            begin = source + const(vector * g.lanes) * across + index * const(g.lanes)
            to = target + index * const(g.lanes * g.columns) + const(vector * g.lanes)
            last = const(g.lanes - 1)
            body.add(transpose(g.dtype, (g.b, begin), across, last, (g.b_panels, to), g.columns))

    turned.add(loop(squares, square), elements(squares * const(g.lanes)))
    dense, along = tirx.And(full, tirx.EQ(across, const(1))), tirx.And(full, tirx.EQ(step, const(1)))
    scope.add(IfThenElse(dense, loop(depth, vectors), IfThenElse(along, turned.body, elements(const(0)))))


def pack_a(g: Buffers, scope: Scope, source: Expr, depth: Var, count: Var, target: Expr) -> None:
    """``count`` rows, at most a register tile's, from index ``source`` of ``a`` on, ``depth`` elements each, are put
    from index ``target`` on."""
    row, step = g.field["a_row"], g.field["a_column"]
    source = scope.name(source, "source")
    pitch = const(g.pitch)

    def elements(begin: Expr) -> Stmt:
        return _elements(begin, depth, count, (g.a, source, step, row), (g.a_panel, lambda at: target + at * pitch))

    turned = Scope()
    squares = turned.name(tirx.truncdiv(depth, const(g.lanes)), "squares")

    def square(body: Scope, index: Var) -> None:
        # Rows behind the last one repeat it: they are read, and their results are not stored.
        for vector in range(g.pitch // g.lanes):
            below = const(vector * g.lanes)
            last = count - const(1) - below
            last = tirx.Select(last < const(0), const(0), last)
            begin = source + smaller(below, count - const(1)) * row + index * const(g.lanes)
            to = target + index * const(g.lanes * g.pitch) + below
            body.add(transpose(g.dtype, (g.a, begin), row, last, (g.a_panel, to), g.pitch))

    turned.add(loop(squares, square), elements(squares * const(g.lanes)))
    full = tirx.And(tirx.EQ(row, const(1)), tirx.EQ(count, const(g.rows)))

    def vectors(body: Scope, k: Var) -> None:
        # The second half vector ends with the last row, so that nothing behind it is read.
        half = 1 << ((g.rows - 1).bit_length() - 1)
        for first in (0, g.rows - half):
            value = g.load(g.a, source + k * step + const(first), half)
            body.add(g.store(g.a_panel, target + k * pitch + const(first), value, half))

    along = IfThenElse(tirx.EQ(step, const(1)), turned.body, elements(const(0)))
    scope.add(IfThenElse(full, loop(depth, vectors), along))


def _elements(
    begin: Expr,
    depth: Var,
    count: Var,
    lines: tuple[Buffer, Expr, Expr, Expr],
    panel: tuple[Buffer, Callable[[Var], Expr]],
) -> Stmt:
    """Lines ``begin`` to ``depth``, one element after another.

    Args:
        count: elements of a line.
        lines: what is read: a buffer, its first index, the strides from line to line and within a line.
        panel: where it goes: a buffer, and the index at which a line starts.
    """
    source, first, step, across = lines
    target, start = panel

    def line(body: Scope, k: Var) -> None:
        at = body.name(begin + k, "at")

        def element(innermost: Scope, j: Var) -> None:
            value = BufferLoad(source, [first + at * step + j * across])
            innermost.add(BufferStore(target, value, [start(at) + j]))

        body.add(loop(count, element))

    return loop(depth - begin, line)
