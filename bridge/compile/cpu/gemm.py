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

Chains (:mod:`bridge.compile.schedule.chain_plan`): a product, a row kernel and a product → one kernel. A task takes
rows of one product of the batch, one strip (a register tile's rows) at a time. It multiplies them by all of ``b``,
packed once for the task; the row code (:mod:`bridge.compile.cpu.row`) processes the scores, which are in the core's own
cache; the result's few rows are multiplied, unpacked, by all of the next ``b``, also packed. An element has the bits
that three kernels give it: the same chunks of ``k`` in the same order, the same row code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import Buffer, BufferLoad, Expr, ForKind, PrimFunc, SeqStmt, Stmt, Var

from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import INDEX, LaunchArguments, LoopScope, const, flat_buffer, loop, loop_function
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
from bridge.compile.cpu.row import RowScope, emit_row
from bridge.compile.loop_ir.operations import FIELDS, Argument
from bridge.compile.schedule.chain_plan import CHAIN_FIELDS, ChainPlan
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["OutputTile", "chain_function", "function_of", "gemm_function", "packed_gemm_function", "packing_function"]
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
        onto = body.name(tirx.Cast(INDEX, tirx.Or(begin > const(0), field["accumulate"] > const(0))), "onto")
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
        onto = body.name(tirx.Cast(INDEX, tirx.Or(begin > const(0), field["accumulate"] > const(0))), "onto")

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


@functools.cache
def chain_function(plan: ChainPlan, tile: RegisterTile) -> PrimFunc:
    """``chain(a, b, next b, other operands of the rows…, c, descriptor)``, all of them pointers.

    The descriptor is int64: :data:`~bridge.compile.schedule.chain_plan.CHAIN_FIELDS`, then the row plan's arguments.
    """
    return _Chain(plan, tile).build()


class _Chain:
    """Builds a chain's kernel.

    Attributes:
        first, second: buffers and fields of the products. The first one's result is ``scores``, the second one's ``a``
            is ``made``: a register tile's rows, padded to whole panels.
        widths: columns of both, padded.
        inputs: of the row plan; ``others``: pointers to all of them except the scores.
    """

    def __init__(self, plan: ChainPlan, tile: RegisterTile) -> None:
        self.plan, dtype = plan, plan.element_type
        self.first, self.second = g, h = Buffers(dtype, tile, 1), Buffers(dtype, tile, 1)
        self.widths = [-(-columns // g.columns) * g.columns for columns in (plan.n, plan.columns)]
        self.given, self.out = (g.a, g.b, h.b), g.c
        self.scores, *allocated = stack_buffer(g.rows * self.widths[0], dtype, "scores")
        self.made, *also = stack_buffer(g.rows * self.widths[0], dtype, "made")
        g.b_panels, *packed = stack_buffer(plan.k * self.widths[0], dtype, "b_panels")
        h.b_panels, *next_packed = stack_buffer(plan.n * self.widths[1], dtype, "next_panels")
        self.allocations = [*packed, *next_packed, *allocated, *also, *g.allocations]
        g.c, h.c, h.a_panel, h.tile = self.scores, self.out, self.made, g.tile
        self.inputs: list[Buffer] = []
        self.others: list[Var] = []
        for position, kind in enumerate(plan.rows.inputs):
            if position == plan.scores:
                self.inputs.append(self.scores)
                continue
            self.others.append(Var(f"in{position}", PointerType(PrimType(kind))))
            self.inputs.append(flat_buffer(kind, f"in{position}", plan.rows.index_type, self.others[-1]))

    def build(self) -> PrimFunc:
        plan, g, count = self.plan, self.first, len(CHAIN_FIELDS)
        numbers = LaunchArguments(count + plan.rows.arguments, INDEX)
        self.number = numbers.part(count, plan.rows.arguments, plan.rows.index_type)
        self.field = field = {name: numbers(Argument(position)) for position, name in enumerate(CHAIN_FIELDS)}
        g.field = {**field, "c_row": const(self.widths[0])}
        self.second.field = {"b_row": field["next_row"], "b_column": field["next_column"], "c_row": field["c_row"]}
        scope = LoopScope()
        tall = scope.name(quotient_up(field["m"], field["block_rows"]), "tall")
        tasks = field["outer"] * field["inner"] * tall
        scope.add(loop(tasks, lambda body, index: self._task(body, index, tall), ForKind.PARALLEL))
        pointer = PointerType(PrimType(plan.element_type))
        params = [*(Var(name, pointer) for name in ("a", "b", "next_b")), *self.others, Var("c", pointer)]
        others = [buffer for position, buffer in enumerate(self.inputs) if position != plan.scores]
        buffers = *self.given, *others, self.out
        declared = [tirx.DeclBuffer(buffer, data=param) for buffer, param in zip(buffers, params, strict=True)]
        text = tvm.ir.StringImm(transposition(g.dtype, g.lanes))
        stmts = SeqStmt([*declared, *numbers.stmts, *scope.stmts])
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, stmts)
        return loop_function([*params, *numbers.params], body)

    def _task(self, scope: LoopScope, index: Var, tall: Var) -> None:
        """Computes the rows of one product of the batch, strip by strip."""
        g, field = self.first, self.field
        batch = scope.name(tirx.truncdiv(index, tall), "batch")
        outer = scope.name(tirx.truncdiv(batch, field["inner"]), "outer_index")
        inner = scope.name(tirx.truncmod(batch, field["inner"]), "inner_index")
        row = scope.name(tirx.truncmod(index, tall) * field["block_rows"], "row")
        rows = scope.name(smaller(field["m"] - row, field["block_rows"]), "rows")

        def start(operand: str) -> Expr:
            return outer * field[f"{operand}_outer"] + inner * field[f"{operand}_inner"]

        a = scope.name(start("a") + row * field["a_row"], "a_start")
        c = scope.name(start("c") + row * field["c_row"], "c_start")
        line = scope.name(batch * field["m"] + row, "line")
        scope.add(*self.allocations)
        self._pack(scope, scope.name(start("b"), "b_start"), scope.name(start("next"), "next_start"))

        def strip(body: LoopScope, index: Var) -> None:
            first = body.name(index * const(g.rows), "first")
            count = body.name(smaller(rows - first, const(g.rows)), "count")
            self._multiply(body, a + first * field["a_row"], count)
            line_of_strip = body.name(line + first, "line")
            body.add(loop(count, lambda inside, at: self._row(inside, line_of_strip, at)))
            self._multiply_made(body, body.name(c + first * field["c_row"], "target"), count)

        scope.add(loop(quotient_up(rows, const(g.rows)), strip))

    def _pack(self, scope: LoopScope, b: Var, next_b: Var) -> None:
        """Packs both operands. Zeroes padding, and rows that may not exist: they take part in products, and arbitrary
        numbers in memory may be slow (denormals)."""
        plan, g = self.plan, self.first
        scope.add(self._cleared(self.made, 0, g.rows * self.widths[0]))
        packed = (g, b, plan.k, plan.n), (self.second, next_b, plan.n, plan.columns)
        for (h, source, depth, columns), width in zip(packed, self.widths, strict=True):
            panel_size = depth * g.columns

            def pack(inside: LoopScope, panel: Var, h=h, source=source, depth=depth, columns=columns) -> None:
                target = panel * const(depth * g.columns)
                pack_b(h, inside, panel, source, const(depth), const(columns), target)

            if columns < width:
                scope.add(self._cleared(h.b_panels, width * depth - panel_size, panel_size))
            scope.add(loop(width // g.columns, pack))

    def _cleared(self, buffer: Buffer, first: int, count: int) -> Stmt:
        g = self.first
        zero = Emitter(g.lanes).const(0.0, g.dtype)
        return loop(
            count // g.lanes, lambda body, i: body.add(g.store(buffer, const(first) + i * const(g.lanes), zero))
        )

    def _multiply(self, scope: LoopScope, a: Expr, count: Var) -> None:
        """Computes the scores of a strip, in whole panels. All of ``k`` is one chunk."""
        plan, g, nothing = self.plan, self.first, const(0)
        assert plan.k <= DEPTH, plan.k
        pack_a(g, scope, a, const(plan.k), count, nothing)
        into = Strip(nothing, const(plan.k), count, const(self.widths[0]), nothing, nothing)

        def tile(inside: LoopScope, panel: Var) -> None:
            multiply_tile(g, inside, panel, into, panel * const(plan.k * g.columns))

        scope.add(loop(self.widths[0] // g.columns, tile))

    def _multiply_made(self, scope: LoopScope, target: Var, count: Var) -> None:
        """Computes the rows of the result from index ``target`` on."""
        plan, g, n = self.plan, self.second, const(self.plan.n)

        def chunk(inside: LoopScope, index: Var) -> None:
            begin = inside.name(index * const(DEPTH), "begin")
            depth = inside.name(smaller(n - begin, const(DEPTH)), "depth")
            onto = inside.name(tirx.Cast(INDEX, begin > const(0)), "onto")
            out = Strip(target, depth, count, const(plan.columns), onto, begin, (1, self.widths[0]))

            def tile(innermost: LoopScope, panel: Var) -> None:
                multiply_tile(g, innermost, panel, out, (panel * n + begin) * const(g.columns))

            inside.add(loop(self.widths[1] // g.columns, tile))

        scope.add(loop(-(-plan.n // DEPTH), chunk))

    def _row(self, scope: LoopScope, line: Var, at: Var) -> None:
        """Computes row ``line + at`` of all rows, which is row ``at`` of the strip."""
        plan = self.plan.rows
        buffers = KernelBuffers(self.inputs, {plan.outputs[0]: self.made}, {}, {})
        place = at * const(self.widths[0]), line + at
        here, row = place if plan.index_type == INDEX else (tirx.Cast(plan.index_type, each) for each in place)
        rows = _Rows(plan, buffers, self.number, self.plan.scores, here)
        body = emit_row(rows, row)
        scope.add(*rows.allocations, body)


class _Rows(RowScope):
    """A row whose scores and result are in a task's own memory, from index ``here`` on."""

    def __init__(self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, scores: int, here: Expr) -> None:
        super().__init__(plan, buffers, number, number(0))
        self._scores, self._here = scores, here

    def start(self, row: Expr) -> None:
        super().start(row)
        self._here = self.head.name_index(self._here, "here")

    def element(self, position: Expr) -> Expr:
        return self._here + position

    def place_of(self, tensor: int, index: Expr) -> Expr:
        if tensor != self._scores:
            return index
        return index - super().element(self.number(0)) + self._here
