"""Matrix products of one matrix with many: it is packed once, all of it, and each product reads the panels.

A step of a recurrent network multiplies few rows by the weight of all steps, a frozen module any number by a constant.
Packing, which a product of many rows pays for at once (:mod:`bridge.compile.cpu.gemm`), would take about as long as a
product of few. An element of the result has the bits that it has there: the same chunks of ``k``, in the same order.
"""

from __future__ import annotations

import functools
from functools import partial

from tvm import tirx
from tvm.tirx import Expr, ForKind, PrimFunc, Var

from bridge.compile.codegen.tir import INDEX, Scope, const, loop
from bridge.compile.cpu.gemm_blocks import Block, function_of, product_of_blocks, with_fields
from bridge.compile.cpu.gemm_buffers import DEPTH, Buffers, RegisterTile, quotient_up, smaller
from bridge.compile.cpu.gemm_pack import pack_a, pack_b
from bridge.compile.cpu.gemm_tile import Strip, multiply_tile

__all__ = ["packed_gemm_function", "packing_function", "strip_rows"]


def strip_rows(tile: RegisterTile, rows: int) -> int:
    """The height of the strips that so many rows are cut into: the one with the least to compute in vain."""

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

    def panel(body: Scope, index: Var) -> None:
        target = index * field["k"] * const(g.columns)
        pack_b(g, body, index, const(0), field["k"], field["n"], target)

    scope.add(loop(count, panel, ForKind.PARALLEL))
    return function_of(g, scope, first=1)


@functools.cache
def packed_gemm_function(dtype: str, tile: RegisterTile) -> PrimFunc:
    """``gemm(a, panels, c, descriptor)``, for products that all read the same panels; see
    :func:`bridge.compile.cpu.gemm.gemm_function`."""
    g = Buffers(dtype, tile, tile.strips)
    return product_of_blocks(g, partial(_task, g))


def _task(g: Buffers, scope: Scope, block: Block) -> None:
    """One block of the result: all of ``k`` in chunks. A panel's chunk stays near while all strips meet it."""
    field, columns, rows, width = g.field, const(g.columns), block.rows, block.width
    panels = scope.name(quotient_up(width, columns), "panels")
    strips = scope.name(quotient_up(rows, field["strip_rows"]), "strips")

    def start(operand: str) -> Expr:
        return block.product(g, operand) + block.row * field[f"{operand}_row"]

    a = scope.name(start("a"), "a_start")
    b = scope.name(block.column * field["k"], "b_start")
    c = scope.name(start("c") + block.column, "c_start")
    scope.add(*g.allocations)

    def chunk(body: Scope, index: Var) -> None:
        begin = body.name(index * const(DEPTH), "begin")
        depth = body.name(smaller(field["k"] - begin, const(DEPTH)), "depth")
        onto = body.name(tirx.Cast(INDEX, tirx.Or(begin > const(0), field["accumulate"] > const(0))), "onto")

        def strip(inside: Scope, number: Var) -> tuple[Var, Var, Var]:
            first = inside.name(number * field["strip_rows"], "first")
            count = inside.name(smaller(rows - first, field["strip_rows"]), "count")
            return first, count, inside.name(number * const(DEPTH * g.pitch), "packed")

        def pack(inside: Scope, number: Var) -> None:
            first, count, packed = strip(inside, number)
            pack_a(g, inside, a + first * field["a_row"] + begin * field["a_column"], depth, count, packed)

        def panel(inside: Scope, number: Var) -> None:
            source = inside.name(b + (number * field["k"] + begin) * columns, "panel_start")

            def tile(innermost: Scope, index: Var) -> None:
                first, count, packed = strip(innermost, index)
                target = innermost.name(c + first * field["c_row"], "target")
                multiply_tile(g, innermost, number, Strip(target, depth, count, width, onto, packed), source)

            inside.add(loop(strips, tile))

        body.add(loop(strips, pack), loop(panels, panel))

    scope.add(loop(quotient_up(field["k"], const(DEPTH)), chunk))
