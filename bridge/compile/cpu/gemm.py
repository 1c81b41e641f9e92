"""General matrix multiplication (GEMM) in generated code: pointers and a descriptor → ``c = a @ b`` or ``c += a @ b``.

The scheme is that of K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a block
of ``b`` is packed into panels of a few vectors' columns, a register tile's rows of ``a`` at a time beside it
(:mod:`bridge.compile.cpu.gemm_pack`), and the innermost loop multiplies them into accumulators in registers
(:mod:`bridge.compile.cpu.gemm_tile`). One function serves every shape and every layout of one element type: extents
and strides are read from a descriptor at the call, so a process compiles it once.

An element of the result is a sum in order of ``k``, in fused multiply-adds within chunks of ``DEPTH``, chunk after
chunk: it depends neither on the blocks, nor on the registers' width, nor on the number of threads. The chunks keep the
rounding error near that of vendor libraries, which cut the sum as well (a chain over all of ``k`` would be about twice
as far off at 3072).
"""

from __future__ import annotations

import functools
from functools import partial

from tvm import tirx
from tvm.tirx import Expr, PrimFunc, Var

from bridge.compile.codegen.tir import INDEX, Scope, const, loop
from bridge.compile.cpu.gemm_blocks import Block, product_of_blocks
from bridge.compile.cpu.gemm_buffers import DEPTH, Buffers, RegisterTile, quotient_up, smaller
from bridge.compile.cpu.gemm_pack import pack_a, pack_b
from bridge.compile.cpu.gemm_tile import Strip, multiply_tile

__all__ = ["gemm_function"]


@functools.cache
def gemm_function(dtype: str, tile: RegisterTile) -> PrimFunc:
    """``gemm(a, b, c, descriptor)``, four pointers; ``dtype`` is float32 or float64.

    The descriptor is int64, see :data:`bridge.compile.loop_ir.product.FIELDS`; its ``block_columns`` must be a
    multiple of the tile's.
    """
    g = Buffers(dtype, tile)
    return product_of_blocks(g, partial(_task, g))


def _task(g: Buffers, scope: Scope, block: Block) -> None:
    """One block of the result: all of ``k`` in chunks."""
    field, rows, width = g.field, block.rows, block.width

    def start(operand: str, along: str, position: Expr) -> Expr:
        steps = block.product(g, operand)
        return scope.name(steps + position * field[f"{operand}_{along}"], f"{operand}_start")

    a, b = start("a", "row", block.row), start("b", "column", block.column)
    c = scope.name(start("c", "row", block.row) + block.column, "c_block")
    panels = scope.name(quotient_up(width, const(g.columns)), "panels")
    scope.add(*g.allocations)

    def panel_of_b(inside: Scope, panel: Var, source: Var, depth: Var) -> None:
        pack_b(g, inside, panel, source, depth, width, panel * const(DEPTH * g.columns))

    def chunk(body: Scope, index: Var) -> None:
        begin = body.name(index * const(DEPTH), "begin")
        depth = body.name(smaller(field["k"] - begin, const(DEPTH)), "depth")
        a_chunk = body.name(a + begin * field["a_column"], "a_chunk")
        b_chunk = body.name(b + begin * field["b_row"], "b_chunk")
        onto = body.name(tirx.Cast(INDEX, tirx.Or(begin > const(0), field["accumulate"] > const(0))), "onto")
        body.add(loop(panels, lambda inside, panel: panel_of_b(inside, panel, b_chunk, depth)))

        def strip(inside: Scope, index: Var) -> None:
            first = inside.name(index * const(g.rows), "first")
            count = inside.name(smaller(rows - first, const(g.rows)), "count")
            pack_a(g, inside, a_chunk + first * field["a_row"], depth, count, const(0))
            target = inside.name(c + first * field["c_row"], "target")
            rows_of_result = Strip(target, depth, count, width, onto, const(0))

            def tile(innermost: Scope, panel: Var) -> None:
                multiply_tile(g, innermost, panel, rows_of_result, panel * const(DEPTH * g.columns))

            inside.add(loop(panels, tile))

        body.add(loop(quotient_up(rows, const(g.rows)), strip))

    scope.add(loop(quotient_up(field["k"], const(DEPTH)), chunk))
