"""Chains (:mod:`bridge.compile.schedule.chain_plan`): a product, a row kernel and a product → one kernel.

A task takes rows of one product of the batch, a register tile's at a time. They meet all of ``b``, packed once for the
task; the code of the rows (:mod:`bridge.compile.cpu.row`) walks the scores, which lie in the core's own cache; what it
makes meets all of the next ``b``, packed likewise, and is not packed itself: the tile reads its few rows where they
are.

An element has the bits that three kernels give it: the same chunks of ``k`` in the same order
(:mod:`bridge.compile.cpu.gemm`), the same code of a row.
"""

from __future__ import annotations

import functools

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import Buffer, Expr, ForKind, PrimFunc, SeqStmt, Stmt, Var

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
from bridge.compile.loop_ir.operations import Argument
from bridge.compile.schedule.chain_plan import CHAIN_FIELDS, ChainPlan
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["chain_function"]


@functools.cache
def chain_function(plan: ChainPlan, tile: RegisterTile) -> PrimFunc:
    """``chain(a, b, next b, what else the rows read…, c, descriptor)``, all of them pointers.

    The descriptor is int64: :data:`~bridge.compile.schedule.chain_plan.CHAIN_FIELDS`, then the row plan's arguments.
    """
    return _Chain(plan, tile).build()


class _Chain:
    """A chain's kernel under construction.

    Attributes:
        first, second: buffers and fields of the products. The first one's result is ``scores``, the second one's ``a``
            is ``made``: a register tile's rows, whose columns are filled up to whole panels.
        widths: columns of both, filled up.
        inputs: of the row plan; ``others``: pointers to those that are not the scores.
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
        """Rows of one product of the batch, strip by strip."""
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
        """Both packed operands, with zeros where no element fills a panel up, and in rows that may be missing: what
        lies there is multiplied too, and numbers that memory happens to hold can take a processor long."""
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
        """The scores of a strip, whole panels of them. All of ``k`` is one chunk."""
        plan, g, nothing = self.plan, self.first, const(0)
        assert plan.k <= DEPTH, plan.k
        pack_a(g, scope, a, const(plan.k), count, nothing)
        into = Strip(nothing, const(plan.k), count, const(self.widths[0]), nothing, nothing)

        def tile(inside: LoopScope, panel: Var) -> None:
            multiply_tile(g, inside, panel, into, panel * const(plan.k * g.columns))

        scope.add(loop(self.widths[0] // g.columns, tile))

    def _multiply_made(self, scope: LoopScope, target: Var, count: Var) -> None:
        """The rows of the result, from index ``target`` on."""
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
        """Row ``line + at`` of all rows, the one numbered ``at`` of the strip."""
        plan = self.plan.rows
        buffers = KernelBuffers(self.inputs, {plan.outputs[0]: self.made}, {}, {})
        place = at * const(self.widths[0]), line + at
        here, row = place if plan.index_type == INDEX else (tirx.Cast(plan.index_type, each) for each in place)
        rows = _Rows(plan, buffers, self.number, self.plan.scores, here)
        body = emit_row(rows, row)
        scope.add(*rows.allocations, body)


class _Rows(RowScope):
    """A row whose scores and whose result lie in a task's own memory, from index ``here`` on."""

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
