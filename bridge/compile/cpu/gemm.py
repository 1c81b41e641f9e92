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

import tvm
from tvm import tirx
from tvm.tirx import BufferLoad, Expr, ForKind, PrimFunc, SeqStmt, Var

from bridge.compile.codegen.tir import INDEX, Scope, const, loop, loop_function
from bridge.compile.cpu.gemm_buffers import DEPTH, Buffers, RegisterTile, quotient_up, smaller
from bridge.compile.cpu.gemm_pack import pack_a, pack_b
from bridge.compile.cpu.gemm_tile import Strip, multiply_tile
from bridge.compile.cpu.transpose import transposition
from bridge.compile.loop_ir.product import FIELDS

__all__ = ["gemm_function"]


@functools.cache
def gemm_function(dtype: str, tile: RegisterTile) -> PrimFunc:
    """``gemm(a, b, c, descriptor)``, four pointers; ``dtype`` is float32 or float64.

    The descriptor is int64, see :data:`bridge.compile.loop_ir.product.FIELDS`; its ``block_columns`` must be a
    multiple of the tile's.
    """
    g = Buffers(dtype, tile)
    scope = Scope()
    g.field = field = {
        name: scope.name(BufferLoad(g.descriptor, [const(position)]), name) for position, name in enumerate(FIELDS)
    }
    tall = scope.name(quotient_up(field["m"], field["block_rows"]), "tall")
    wide = scope.name(quotient_up(field["n"], field["block_columns"]), "wide")
    tasks = field["outer"] * field["inner"] * tall * wide
    scope.add(loop(tasks, lambda body, index: _task(g, body, index, tall, wide), ForKind.PARALLEL))
    declared = [tirx.DeclBuffer(buffer, data=param) for buffer, param in zip(g.operands, g.params, strict=True)]
    text = tvm.ir.StringImm(transposition(dtype, g.lanes))
    body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, SeqStmt([*declared, *scope.stmts]))
    return loop_function(g.params, body, shared=True)


def _task(g: Buffers, scope: Scope, index: Var, tall: Var, wide: Var) -> None:
    """One block of the result: all of ``k`` in chunks."""
    field = g.field
    block = scope.name(tirx.truncmod(index, tall * wide), "block")
    batch = scope.name(tirx.truncdiv(index, tall * wide), "batch")
    outer = scope.name(tirx.truncdiv(batch, field["inner"]), "outer_index")
    inner = scope.name(tirx.truncmod(batch, field["inner"]), "inner_index")
    row = scope.name(tirx.truncdiv(block, wide) * field["block_rows"], "row")
    column = scope.name(tirx.truncmod(block, wide) * field["block_columns"], "column")
    rows = scope.name(smaller(field["m"] - row, field["block_rows"]), "rows")
    width = scope.name(smaller(field["n"] - column, field["block_columns"]), "width")

    def start(operand: str, along: str, position: Expr) -> Expr:
        steps = outer * field[f"{operand}_outer"] + inner * field[f"{operand}_inner"]
        return scope.name(steps + position * field[f"{operand}_{along}"], f"{operand}_start")

    a, b = start("a", "row", row), start("b", "column", column)
    c = scope.name(start("c", "row", row) + column, "c_block")
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
