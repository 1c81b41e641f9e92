"""Matrix products on the CPU: shapes → a kernel of register tiles over blocks that fit the caches.

General matrix multiplication (GEMM) in generated code: pointers and a descriptor → ``c = a @ b`` or ``c += a @ b``. The
scheme is that of K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a block of
``b`` is packed into panels of a few vectors' columns, next to a register tile's rows of ``a``, and the innermost loop
multiplies them into accumulators in registers (:mod:`bridge.compile.cpu.gemm_tile`). One function serves every shape
and layout of one element type: it reads extents and strides from a descriptor, so a process compiles it once.

An element of the result is a sum in order of ``k``, in fused multiply-adds within chunks of ``DEPTH``, chunk after
chunk: it depends neither on the blocks, nor on the registers' width, nor on the number of threads. The chunks keep the
rounding error near that of vendor libraries (one chain over ``k = 3072`` would have about twice the error).

Packed products: many products with one matrix, which is packed once, in full. A step of a recurrent network multiplies
few rows by a weight, a frozen module any number of rows by a constant; packing for one product of few rows would take
as long as the product. The bits are the same: the same chunks of ``k``, in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import tirx
from tvm.tirx import BufferLoad, Expr, ForKind, PrimFunc, SeqStmt, Var

from bridge.compile.codegen.tir import INDEX, LoopScope, const, loop, loop_function
from bridge.compile.cpu.gemm_tile import (
    DEPTH,
    Buffers,
    RegisterTile,
    Strip,
    multiply_tile,
    pack_a,
    pack_b,
    quotient_up,
    smaller,
)
from bridge.compile.cpu.loops import transposition
from bridge.compile.loop_ir.operations import FIELDS

__all__ = ["OutputTile", "function_of", "gemm_function", "packed_gemm_function", "packing_function"]
__all__ += ["product_of_blocks", "strip_rows", "with_fields"]


@dataclass(frozen=True)
class OutputTile:
    """One block of the results, of which ``rows`` rows and ``width`` columns exist.

    Attributes:
        batch: its product's indices along the two batch axes.
        row, column: of its first element in the result.
    """

    batch: tuple[Var, Var]
    row: Var
    column: Var
    rows: Var
    width: Var

    def product(self, g: Buffers, operand: str) -> Expr:
        """Index of the first element of an operand's matrix for this block's product."""
        outer, inner = self.batch
        return outer * g.field[f"{operand}_outer"] + inner * g.field[f"{operand}_inner"]


def with_fields(g: Buffers) -> LoopScope:
    """A scope that has read the descriptor's fields."""
    scope = LoopScope()
    g.field = {
        name: scope.name(BufferLoad(g.descriptor, [const(position)]), name) for position, name in enumerate(FIELDS)
    }
    return scope


def product_of_blocks(g: Buffers, task: Callable[[LoopScope, OutputTile], None]) -> PrimFunc:
    """The kernel whose parallel tasks are the blocks of all products."""
    scope = with_fields(g)
    tall = scope.name(quotient_up(g.field["m"], g.field["block_rows"]), "tall")
    wide = scope.name(quotient_up(g.field["n"], g.field["block_columns"]), "wide")
    tasks = g.field["outer"] * g.field["inner"] * tall * wide
    scope.add(loop(tasks, lambda body, index: task(body, _block(g, body, index, tall, wide)), ForKind.PARALLEL))
    return function_of(g, scope)


def _block(g: Buffers, scope: LoopScope, index: Var, tall: Var, wide: Var) -> OutputTile:
    field = g.field
    block = scope.name(tirx.truncmod(index, tall * wide), "block")
    batch = scope.name(tirx.truncdiv(index, tall * wide), "batch")
    outer = scope.name(tirx.truncdiv(batch, field["inner"]), "outer_index")
    inner = scope.name(tirx.truncmod(batch, field["inner"]), "inner_index")
    row = scope.name(tirx.truncdiv(block, wide) * field["block_rows"], "row")
    column = scope.name(tirx.truncmod(block, wide) * field["block_columns"], "column")
    rows = scope.name(smaller(field["m"] - row, field["block_rows"]), "rows")
    width = scope.name(smaller(field["n"] - column, field["block_columns"]), "width")
    return OutputTile((outer, inner), row, column, rows, width)


def function_of(g: Buffers, scope: LoopScope, first: int = 0) -> PrimFunc:
    """The kernel with a scope's statements, and with the parameters from ``first`` on."""
    params = g.params[first:]
    declared = [tirx.DeclBuffer(buffer, data=param) for buffer, param in zip(g.operands[first:], params, strict=True)]
    text = tvm.ir.StringImm(transposition(g.dtype, g.lanes))
    body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, SeqStmt([*declared, *scope.stmts]))
    return loop_function(params, body, shared=True)


@functools.cache
def gemm_function(dtype: str, tile: RegisterTile) -> PrimFunc:
    """``gemm(a, b, c, descriptor)``, four pointers; ``dtype`` is float32 or float64.

    Descriptor: int64 :data:`bridge.compile.loop_ir.operations.FIELDS`; ``block_columns`` is a multiple of the tile's.
    """
    g = Buffers(dtype, tile)
    return product_of_blocks(g, partial(_task, g))


def _task(g: Buffers, scope: LoopScope, block: OutputTile) -> None:
    """One block of the result: all of ``k`` in chunks."""
    field, rows, width = g.field, block.rows, block.width

    def start(operand: str, along: str, position: Expr) -> Expr:
        steps = block.product(g, operand)
        return scope.name(steps + position * field[f"{operand}_{along}"], f"{operand}_start")

    a, b = start("a", "row", block.row), start("b", "column", block.column)
    c = scope.name(start("c", "row", block.row) + block.column, "c_block")
    panels = scope.name(quotient_up(width, const(g.columns)), "panels")
    scope.add(*g.allocations)

    def panel_of_b(inside: LoopScope, panel: Var, source: Var, depth: Var) -> None:
        pack_b(g, inside, panel, source, depth, width, panel * const(DEPTH * g.columns))

    def chunk(body: LoopScope, index: Var) -> None:
        begin = body.name(index * const(DEPTH), "begin")
        depth = body.name(smaller(field["k"] - begin, const(DEPTH)), "depth")
        a_chunk = body.name(a + begin * field["a_column"], "a_chunk")
        b_chunk = body.name(b + begin * field["b_row"], "b_chunk")
        onto = body.name(tirx.Cast(INDEX, begin > const(0)), "onto")
        body.add(loop(panels, lambda inside, panel: panel_of_b(inside, panel, b_chunk, depth)))

        def strip(inside: LoopScope, index: Var) -> None:
            first = inside.name(index * const(g.rows), "first")
            count = inside.name(smaller(rows - first, const(g.rows)), "count")
            pack_a(g, inside, a_chunk + first * field["a_row"], depth, count, const(0))
            target = inside.name(c + first * field["c_row"], "target")
            rows_of_result = Strip(target, depth, count, width, onto, const(0))

            def tile(innermost: LoopScope, panel: Var) -> None:
                multiply_tile(g, innermost, panel, rows_of_result, panel * const(DEPTH * g.columns))

            inside.add(loop(panels, tile))

        body.add(loop(quotient_up(rows, const(g.rows)), strip))

    scope.add(loop(quotient_up(field["k"], const(DEPTH)), chunk))


def strip_rows(tile: RegisterTile, rows: int) -> int:
    """The strip height that minimizes computed rows for ``rows`` rows."""

    def computed(height: int) -> int:
        left = rows % height
        return rows - left + (next(each for each in tile.heights if each >= left) if left else 0)

    return min(reversed(tile.heights), key=computed)


@functools.cache
def packing_function(dtype: str, tile: RegisterTile) -> PrimFunc:
    """``pack(b, panels, descriptor)``: all of ``b`` as ``[panel][k][column]``; the last panel is not filled up."""
    g = Buffers(dtype, tile)
    g.b_panels = g.c
    scope = with_fields(g)
    field = g.field
    count = quotient_up(field["n"], const(g.columns))

    def panel(body: LoopScope, index: Var) -> None:
        target = index * field["k"] * const(g.columns)
        pack_b(g, body, index, const(0), field["k"], field["n"], target)

    scope.add(loop(count, panel, ForKind.PARALLEL))
    return function_of(g, scope, first=1)


@functools.cache
def packed_gemm_function(dtype: str, tile: RegisterTile) -> PrimFunc:
    """``gemm(a, panels, c, descriptor)`` for products with common panels; see :func:`gemm_function`."""
    g = Buffers(dtype, tile, tile.strips)
    return product_of_blocks(g, partial(_packed_task, g))


def _packed_task(g: Buffers, scope: LoopScope, block: OutputTile) -> None:
    """One block of the result: all of ``k`` in chunks. A panel's chunk stays in the cache for all strips."""
    field, columns, rows, width = g.field, const(g.columns), block.rows, block.width
    panels = scope.name(quotient_up(width, columns), "panels")
    strips = scope.name(quotient_up(rows, field["strip_rows"]), "strips")

    def start(operand: str) -> Expr:
        return block.product(g, operand) + block.row * field[f"{operand}_row"]

    a = scope.name(start("a"), "a_start")
    b = scope.name(block.column * field["k"], "b_start")
    c = scope.name(start("c") + block.column, "c_start")
    scope.add(*g.allocations)

    def chunk(body: LoopScope, index: Var) -> None:
        begin = body.name(index * const(DEPTH), "begin")
        depth = body.name(smaller(field["k"] - begin, const(DEPTH)), "depth")
        onto = body.name(tirx.Cast(INDEX, begin > const(0)), "onto")

        def strip(inside: LoopScope, number: Var) -> tuple[Var, Var, Var]:
            first = inside.name(number * field["strip_rows"], "first")
            count = inside.name(smaller(rows - first, field["strip_rows"]), "count")
            return first, count, inside.name(number * const(DEPTH * g.pitch), "packed")

        def pack(inside: LoopScope, number: Var) -> None:
            first, count, packed = strip(inside, number)
            pack_a(g, inside, a + first * field["a_row"] + begin * field["a_column"], depth, count, packed)

        def panel(inside: LoopScope, number: Var) -> None:
            source = inside.name(b + (number * field["k"] + begin) * columns, "panel_start")

            def tile(innermost: LoopScope, index: Var) -> None:
                first, count, packed = strip(innermost, index)
                target = innermost.name(c + first * field["c_row"], "target")
                multiply_tile(g, innermost, number, Strip(target, depth, count, width, onto, packed), source)

            inside.add(loop(strips, tile))

        body.add(loop(strips, pack), loop(panels, panel))

    scope.add(loop(quotient_up(field["k"], const(DEPTH)), chunk))
