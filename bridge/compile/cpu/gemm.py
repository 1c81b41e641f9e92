"""Code of matrix products: packed panels and a tile of fused multiply-adds that stays in registers.

The scheme is that of K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a block
of ``b`` is packed into panels of a few vectors' columns, ``ROWS`` rows of ``a`` at a time beside it, and the innermost
loop multiplies them into accumulators in registers. One function serves every shape and every layout of one element
type: extents and strides are read from a descriptor at the call, so a process compiles it once.

An element of the result is a sum in order of ``k``, in fused multiply-adds within chunks of ``DEPTH``, chunk after
chunk: it depends neither on the blocks nor on the number of threads. The chunks keep the rounding error near that of
vendor libraries, which cut the sum as well (a chain over all of ``k`` would be about twice as far off at 3072).
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import (
    Broadcast,
    Buffer,
    BufferLoad,
    BufferStore,
    Expr,
    For,
    ForKind,
    IfThenElse,
    PrimFunc,
    Ramp,
    SeqStmt,
    Stmt,
    Var,
)

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.runtime.build import LOOPS_ATTR, SHARED_ATTR

__all__ = ["DEPTH", "FIELDS", "ROWS", "WIDEST_BLOCK", "columns", "gemm_function"]

ROWS = 14
"""Rows of the register tile: with two vectors of columns, 28 accumulators of AVX-512's 32 registers."""

DEPTH = 256
"""Terms of one chain of multiply-adds."""

WIDEST_BLOCK = 6
"""Panels of a packed block of ``b``: 196 kB, a part of a second-level cache."""

_VECTORS = 2
_HALF = 8  # elements; two of them cover the rows of a tile
_TILES = (4, 8, ROWS)  # the last rows of a block use the smallest tile that holds them
_INDEX = "int64"

FIELDS = (
    *("outer", "inner", "m", "n", "k"),
    *("a_outer", "a_inner", "a_row", "a_column"),
    *("b_outer", "b_inner", "b_row", "b_column"),
    *("c_outer", "c_inner", "c_row"),
    *("block_rows", "block_columns", "accumulate"),
)
"""The descriptor, int64: ``c[o, i] = a[o, i] @ b[o, i]`` for two batch extents, strides in elements (a result's row is
dense), the block of one task (``block_columns`` a multiple of :func:`columns`), whether ``c`` is added to."""


def columns(dtype: str) -> int:
    """Columns of the register tile for an element type."""
    return _VECTORS * _lanes(dtype)


def _lanes(dtype: str) -> int:
    return 64 // itemsize(dtype)


def gemm_function(dtype: str) -> PrimFunc:
    """``gemm(a, b, c, descriptor)``, four pointers; ``dtype`` is float32 or float64. See :data:`FIELDS`."""
    return _Gemm(dtype).function()


def _const(number: int) -> Expr:
    return tirx.const(number, _INDEX)


def _smaller(a: Expr, b: Expr) -> Expr:
    return tirx.Select(a < b, a, b)


def _quotient_up(a: Expr, b: Expr) -> Expr:
    return tirx.truncdiv(a + (b - _const(1)), b)


class _Scope:
    """Statements of one loop body, in order."""

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []

    def name(self, value: Expr, hint: str) -> Var:
        var = Var(hint, _INDEX)
        self.stmts.append(tirx.Bind(var, value))
        return var

    def add(self, *stmts: Stmt) -> None:
        self.stmts += stmts

    @property
    def body(self) -> Stmt:
        return self.stmts[0] if len(self.stmts) == 1 else SeqStmt(self.stmts)


def _loop(extent: Expr, body: Callable[[_Scope, Var], None], kind: ForKind = ForKind.SERIAL) -> Stmt:
    scope, index = _Scope(), Var("i", _INDEX)
    body(scope, index)
    return For(index, _const(0), extent, kind, scope.body)


class _Gemm:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.lanes = _lanes(dtype)
        self.columns = columns(dtype)
        self.field: dict[str, Expr] = {}
        pointer = PointerType(PrimType(dtype))
        self.params = [Var(name, pointer) for name in "abc"] + [Var("descriptor", PointerType(PrimType(_INDEX)))]
        self.a, self.b, self.c = (self._flat(param, dtype) for param in self.params[:3])
        self.descriptor = self._flat(self.params[3], _INDEX)
        self.b_panels, self.b_allocation = stack_buffer(DEPTH * WIDEST_BLOCK * self.columns, dtype, "b_panels")
        self.a_panel, self.a_allocation = stack_buffer(DEPTH * self._pitch, dtype, "a_panel")
        self.tile, self.tile_allocation = stack_buffer(ROWS * self.columns, dtype, "tile")

    @staticmethod
    def _flat(pointer: Var, dtype: str) -> Buffer:
        return tirx.decl_buffer((1 << 40,), dtype, pointer.name, data=pointer, data_alignment=itemsize(dtype))

    def function(self) -> PrimFunc:
        scope = _Scope()
        for position, name in enumerate(FIELDS):
            self.field[name] = scope.name(BufferLoad(self.descriptor, [_const(position)]), name)
        field = self.field
        tall = scope.name(_quotient_up(field["m"], field["block_rows"]), "tall")
        wide = scope.name(_quotient_up(field["n"], field["block_columns"]), "wide")

        def task(body: _Scope, index: Var) -> None:
            self._task(body, index, tall, wide)

        scope.add(_loop(field["outer"] * field["inner"] * tall * wide, task, ForKind.PARALLEL))
        buffers = (self.a, self.b, self.c, self.descriptor)
        declared = [tirx.DeclBuffer(buffer, data=param) for buffer, param in zip(buffers, self.params, strict=True)]
        body = SeqStmt([*declared, *scope.stmts])
        text = tvm.ir.StringImm(_transposition(self.dtype))
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body)
        return PrimFunc(self.params, body).with_attr(
            {"tirx.noalias": True, "tirx.is_scheduled": True, LOOPS_ATTR: True, SHARED_ATTR: True}
        )

    def _task(self, scope: _Scope, index: Var, tall: Var, wide: Var) -> None:
        """One block of the result: all of ``k`` in chunks."""
        field = self.field
        block = scope.name(tirx.truncmod(index, tall * wide), "block")
        batch = scope.name(tirx.truncdiv(index, tall * wide), "batch")
        outer = scope.name(tirx.truncdiv(batch, field["inner"]), "outer_index")
        inner = scope.name(tirx.truncmod(batch, field["inner"]), "inner_index")
        row = scope.name(tirx.truncdiv(block, wide) * field["block_rows"], "row")
        column = scope.name(tirx.truncmod(block, wide) * field["block_columns"], "column")
        rows = scope.name(_smaller(field["m"] - row, field["block_rows"]), "rows")
        width = scope.name(_smaller(field["n"] - column, field["block_columns"]), "width")

        def start(operand: str, along: str, position: Expr) -> Expr:
            steps = outer * field[f"{operand}_outer"] + inner * field[f"{operand}_inner"]
            return scope.name(steps + position * field[f"{operand}_{along}"], f"{operand}_start")

        a, b = start("a", "row", row), start("b", "column", column)
        c = scope.name(start("c", "row", row) + column, "c_block")
        panels = scope.name(_quotient_up(width, _const(self.columns)), "panels")
        scope.add(self.b_allocation, self.a_allocation, self.tile_allocation)

        def chunk(body: _Scope, index: Var) -> None:
            begin = body.name(index * _const(DEPTH), "begin")
            depth = body.name(_smaller(field["k"] - begin, _const(DEPTH)), "depth")
            a_chunk = body.name(a + begin * field["a_column"], "a_chunk")
            b_chunk = body.name(b + begin * field["b_row"], "b_chunk")
            onto = body.name(tirx.Cast(_INDEX, tirx.Or(begin > _const(0), field["accumulate"] > _const(0))), "onto")
            body.add(_loop(panels, lambda inside, panel: self._pack_b(inside, panel, b_chunk, depth, width)))

            def strip(inside: _Scope, index: Var) -> None:
                first = inside.name(index * _const(ROWS), "first")
                count = inside.name(_smaller(rows - first, _const(ROWS)), "count")
                self._pack_a(inside, a_chunk + first * field["a_row"], depth, count)
                target = inside.name(c + first * field["c_row"], "target")
                inside.add(
                    _loop(panels, lambda tile, panel: self._tile(tile, panel, target, depth, count, width, onto))
                )

            body.add(_loop(_quotient_up(rows, _const(ROWS)), strip))

        scope.add(_loop(_quotient_up(field["k"], _const(DEPTH)), chunk))

    # Packing: panels[k][column] and panel[k][row], so that the innermost loop reads both front to back.

    def _pack_b(self, scope: _Scope, panel: Var, source: Expr, depth: Var, width: Var) -> None:
        step, across = self.field["b_row"], self.field["b_column"]
        column = scope.name(panel * _const(self.columns), "column")
        source = scope.name(source + column * across, "source")
        target = scope.name(panel * _const(DEPTH * self.columns), "target")
        valid = scope.name(_smaller(width - column, _const(self.columns)), "valid")
        full = tirx.EQ(valid, _const(self.columns))

        def vectors(body: _Scope, k: Var) -> None:
            for vector in range(_VECTORS):
                shift = _const(vector * self.lanes)
                value = self._load(self.b, source + k * step + shift)
                body.add(self._store(self.b_panels, target + k * _const(self.columns) + shift, value))

        def elements(begin: Expr) -> Stmt:
            def line(body: _Scope, k: Var) -> None:
                at = body.name(begin + k, "at")

                def element(innermost: _Scope, j: Var) -> None:
                    value = BufferLoad(self.b, [source + at * step + j * across])
                    innermost.add(BufferStore(self.b_panels, value, [target + at * _const(self.columns) + j]))

                body.add(_loop(valid, element))

            return _loop(depth - begin, line)

        turned = _Scope()
        squares = turned.name(tirx.truncdiv(depth, _const(self.lanes)), "squares")

        def square(body: _Scope, index: Var) -> None:
            for vector in range(_VECTORS):
                begin = source + _const(vector * self.lanes) * across + index * _const(self.lanes)
                to = target + index * _const(self.lanes * self.columns) + _const(vector * self.lanes)
                last = _const(self.lanes - 1)
                body.add(self._transpose(self.b, begin, across, last, self.b_panels, to, self.columns))

        turned.add(_loop(squares, square), elements(squares * _const(self.lanes)))
        dense, along = tirx.And(full, tirx.EQ(across, _const(1))), tirx.And(full, tirx.EQ(step, _const(1)))
        scope.add(IfThenElse(dense, _loop(depth, vectors), IfThenElse(along, turned.body, elements(_const(0)))))

    def _pack_a(self, scope: _Scope, source: Expr, depth: Var, count: Var) -> None:
        row, step = self.field["a_row"], self.field["a_column"]
        source = scope.name(source, "source")
        pitch = _const(self._pitch)

        def elements(begin: Expr) -> Stmt:
            def line(body: _Scope, k: Var) -> None:
                at = body.name(begin + k, "at")

                def element(innermost: _Scope, i: Var) -> None:
                    value = BufferLoad(self.a, [source + at * step + i * row])
                    innermost.add(BufferStore(self.a_panel, value, [at * pitch + i]))

                body.add(_loop(count, element))

            return _loop(depth - begin, line)

        turned = _Scope()
        squares = turned.name(tirx.truncdiv(depth, _const(self.lanes)), "squares")

        def square(body: _Scope, index: Var) -> None:
            # Rows behind the last one repeat it: they are read, and their results are not stored.
            for vector in range(self._pitch // self.lanes):
                below = _const(vector * self.lanes)
                last = count - _const(1) - below
                last = tirx.Select(last < _const(0), _const(0), last)
                begin = source + _smaller(below, count - _const(1)) * row + index * _const(self.lanes)
                to = index * _const(self.lanes * self._pitch) + below
                body.add(self._transpose(self.a, begin, row, last, self.a_panel, to, self._pitch))

        turned.add(_loop(squares, square), elements(squares * _const(self.lanes)))
        full = tirx.And(tirx.EQ(row, _const(1)), tirx.EQ(count, _const(ROWS)))

        def vectors(body: _Scope, k: Var) -> None:
            # The second half vector ends with the last row, so that nothing behind it is read.
            for first in (0, ROWS - _HALF):
                value = self._load(self.a, source + k * step + _const(first), _HALF)
                body.add(self._store(self.a_panel, k * pitch + _const(first), value, _HALF))

        scope.add(
            IfThenElse(
                full,
                _loop(depth, vectors),
                IfThenElse(tirx.EQ(step, _const(1)), turned.body, elements(_const(0))),
            )
        )

    @property
    def _pitch(self) -> int:
        """Elements from one ``k`` to the next in the panel of ``a``: whole vectors."""
        return -(-ROWS // self.lanes) * self.lanes

    # The register tile.

    def _tile(self, scope: _Scope, panel: Var, target: Expr, depth: Var, count: Var, width: Var, onto: Var) -> None:
        column = scope.name(panel * _const(self.columns), "column")
        source = scope.name(panel * _const(DEPTH * self.columns), "source")
        valid = scope.name(_smaller(width - column, _const(self.columns)), "valid")
        target = scope.name(target + column, "target")
        tiles = [self._tile_of(rows, source, target, depth, count, valid, onto) for rows in _TILES]
        chosen = tiles[-1]
        for rows, stmt in reversed(list(zip(_TILES[:-1], tiles[:-1], strict=True))):
            chosen = IfThenElse(count <= _const(rows), stmt, chosen)
        scope.add(chosen)

    def _tile_of(self, rows: int, source: Var, target: Var, depth: Var, count: Var, valid: Var, onto: Var) -> Stmt:
        """``rows`` rows of one panel over a chunk of ``k``, then stored or added to the result."""
        sums, allocation = stack_buffer(rows * self.columns, self.dtype, f"sums{rows}")
        parts = [(i, vector) for i in range(rows) for vector in range(_VECTORS)]

        def part(i: int, vector: int) -> Expr:
            return _const(i * self.columns + vector * self.lanes)

        zero = Emitter(self.lanes).const(0.0, self.dtype)
        scope = _Scope()
        scope.add(allocation, *(self._store(sums, part(*which), zero) for which in parts))

        def multiply(body: _Scope, k: Var) -> None:
            emit = Emitter(self.lanes)
            start = source + k * _const(self.columns)
            b = [emit.bind(self._load(self.b_panels, start + _const(v * self.lanes))) for v in range(_VECTORS)]
            for i in range(rows):
                a = Broadcast(emit.bind(BufferLoad(self.a_panel, [k * _const(self._pitch) + _const(i)])), self.lanes)
                for vector in range(_VECTORS):
                    total = emit.fma(a, b[vector], self._load(sums, part(i, vector)))
                    emit.stmts.append(self._store(sums, part(i, vector), total))
            body.add(*emit.stmts)

        scope.add(_loop(depth, multiply))
        whole = tirx.And(tirx.EQ(count, _const(rows)), tirx.EQ(valid, _const(self.columns)))
        scope.add(
            IfThenElse(
                whole,
                self._choose(onto, lambda add: self._store_tile(sums, parts, part, target, add)),
                SeqStmt(
                    [
                        *(self._store(self.tile, part(*which), self._load(sums, part(*which))) for which in parts),
                        self._choose(onto, lambda add: self._store_edge(target, count, valid, add)),
                    ]
                ),
            )
        )
        return scope.body

    @staticmethod
    def _choose(onto: Var, stmt: Callable[[bool], Stmt]) -> Stmt:
        return IfThenElse(onto > _const(0), stmt(True), stmt(False))

    def _store_tile(self, sums: Buffer, parts: list, part: Callable, target: Var, add: bool) -> Stmt:
        stmts = []
        for i, vector in parts:
            at = target + _const(i) * self.field["c_row"] + _const(vector * self.lanes)
            value = self._load(sums, part(i, vector))
            stmts.append(self._store(self.c, at, self._load(self.c, at) + value if add else value))
        return SeqStmt(stmts)

    def _store_edge(self, target: Var, count: Var, valid: Var, add: bool) -> Stmt:
        def line(body: _Scope, i: Var) -> None:
            start = body.name(target + i * self.field["c_row"], "start")

            def element(innermost: _Scope, j: Var) -> None:
                value = BufferLoad(self.tile, [i * _const(self.columns) + j])
                at = start + j
                innermost.add(BufferStore(self.c, BufferLoad(self.c, [at]) + value if add else value, [at]))

            body.add(_loop(valid, element))

        return _loop(count, line)

    # Accesses.

    def _load(self, buffer: Buffer, at: Expr, lanes: int | None = None) -> Expr:
        return BufferLoad(buffer, [Ramp(at, _const(1), lanes or self.lanes)])

    def _store(self, buffer: Buffer, at: Expr, value: Expr, lanes: int | None = None) -> Stmt:
        return BufferStore(buffer, value, [Ramp(at, _const(1), lanes or self.lanes)])

    def _transpose(
        self, source: Buffer, at: Expr, step: Expr, last: Expr, target: Buffer, to: Expr, pitch: int
    ) -> Stmt:
        """A square of ``lanes x lanes``: lines ``step`` apart, those behind ``last`` repeated, become columns."""
        begin, end = (tirx.address_of(BufferLoad(buffer, [index])) for buffer, index in ((source, at), (target, to)))
        name = f"bridge_transpose_{self.dtype}"
        return tirx.Evaluate(tirx.call_extern("int32", name, begin, step, last, end, _const(pitch)))


def _transposition(dtype: str) -> str:
    """LLVM IR of the transposition of a square in registers.

    In TVM's IR each of its shuffles would go through concatenated vectors, which cost LLVM a second.
    """
    lanes, element = _lanes(dtype), {"float32": "float", "float64": "double"}[dtype]
    vector = f"<{lanes} x {element}>"
    lines = [
        f"define internal i32 @bridge_transpose_{dtype}(ptr %from, i64 %step, i64 %last, ptr %to, i64 %pitch)"
        " alwaysinline {"
    ]
    for i in range(lanes):
        lines += [
            f"  %behind{i} = icmp slt i64 %last, {i}",
            f"  %line{i} = select i1 %behind{i}, i64 %last, i64 {i}",
            f"  %shift{i} = mul i64 %line{i}, %step",
            f"  %source{i} = getelementptr {element}, ptr %from, i64 %shift{i}",
            f"  %v{i} = load {vector}, ptr %source{i}, align {itemsize(dtype)}",
        ]
    current = [f"%v{i}" for i in range(lanes)]
    distance = lanes // 2
    while distance:  # exchange the off-diagonal quarters of ever smaller squares
        low = [k + lanes - distance if k & distance else k for k in range(lanes)]
        high = [k + lanes if k & distance else k + distance for k in range(lanes)]
        following = list(current)
        for i in range(lanes):
            if i & distance:
                continue
            pair = f"{vector} {current[i]}, {vector} {current[i | distance]}"
            for row, picks in ((i, low), (i | distance, high)):
                mask = ", ".join(f"i32 {pick}" for pick in picks)
                following[row] = f"%d{distance}_{row}"
                lines.append(f"  {following[row]} = shufflevector {pair}, <{lanes} x i32> <{mask}>")
        current = following
        distance //= 2
    for i, value in enumerate(current):
        lines += [
            f"  %row{i} = mul i64 %pitch, {i}",
            f"  %target{i} = getelementptr {element}, ptr %to, i64 %row{i}",
            f"  store {vector} {value}, ptr %target{i}, align {itemsize(dtype)}",
        ]
    return "\n".join([*lines, "  ret i32 0", "}", ""])
