"""Register tiles and panels of matrix products: operands → memory in the order in which the tiles read it.

Packing: blocks of the operands, of any strides → dense panels in the order of the inner loop: by vectors if a line of
the panel is dense in memory, by squares transposed in registers if the lines along ``k`` are, else by elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.target import Target
from tvm.tirx import Broadcast, Buffer, BufferLoad, BufferStore, Expr, IfThenElse, Ramp, SeqStmt, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.tir import INDEX, LoopScope, const, loop
from bridge.compile.cpu.loops import transpose

__all__ = ["DEPTH", "NARROW", "VECTORS", "WIDE", "Buffers", "RegisterTile", "Strip", "multiply_tile", "pack_a"]
__all__ += ["pack_b", "quotient_up", "register_tile", "smaller"]

DEPTH = 256
"""Terms of one chain of multiply-adds: a chunk of ``k``."""

VECTORS = 2
"""Vectors in a row of the register tile."""


@dataclass(frozen=True)
class RegisterTile:
    """The part of a result whose sums stay in registers, for a processor's vector registers.

    Attributes:
        heights: rows, ascending; the last is the tile's. The last rows of a block use the smallest that holds them.
        vector: bytes of a vector register.
        panels: maximum of a packed block of ``b``: 196 kB, a part of a second-level cache.
        strips: maximum of ``a`` per panel of a packed ``b``: 224 kB of float32. Each block of strips reads ``b`` from
            memory; with a third of the strips, a weight of 768 x 3072 cost a tenth more.
    """

    heights: tuple[int, ...]
    vector: int
    panels: int
    strips: int

    @property
    def rows(self) -> int:
        """Rows of the whole tile."""
        return self.heights[-1]

    def lanes(self, dtype: str) -> int:
        """Elements of a vector."""
        return self.vector // itemsize(dtype)

    def columns(self, dtype: str) -> int:
        """Columns of the tile for an element type."""
        return VECTORS * self.lanes(dtype)


WIDE = RegisterTile((4, 8, 14), 64, 6, 14)
"""28 accumulators of AVX-512's 32 registers."""

NARROW = RegisterTile((2, 4, 6), 32, 12, 28)
"""12 accumulators of AVX2's 16 registers; two hold ``b``, one ``a``."""


@lru_cache(maxsize=8)  # TVM takes half a millisecond to answer, and each product of a model asks several times
def register_tile(target: Target) -> RegisterTile | None:
    """The tile for a processor; ``None`` without vector fused multiply-adds."""

    def has(feature: str) -> bool:
        return bool(tvm.get_global_func("target.target_has_feature")(feature, target))

    if has("avx512f"):
        return WIDE
    return NARROW if has("avx2") and has("fma") else None


def smaller(a: Expr, b: Expr) -> Expr:
    """The smaller of two indices."""
    return tirx.Select(a < b, a, b)


def quotient_up(a: Expr, b: Expr) -> Expr:
    """``a / b`` rounded up."""
    return tirx.truncdiv(a + (b - const(1)), b)


class Buffers:
    """The buffers of a product's code.

    Attributes:
        params: the kernel's parameters, pointers to ``a``, ``b``, ``c`` and the descriptor.
        operands: these four as flat buffers.
        b_panels, a_panel: operands packed in the innermost loop's order, ``[panel][k][column]`` and ``[k][row]``.
        tile: the register tile at the edge of the result, before its valid part is stored.
        allocations: of ``b_panels``, ``a_panel`` and ``tile``.
        field: the descriptor's fields, once the kernel has read them.
    """

    def __init__(self, dtype: str, tile: RegisterTile, strips: int = 0) -> None:
        """``strips``: of ``a`` that are packed at once for a packed ``b``; 0: ``b`` is not packed before."""
        self.dtype, self._shape = dtype, tile
        self.field: Mapping[str, Expr] = {}
        pointer = PointerType(PrimType(dtype))
        self.params = [Var(name, pointer) for name in "abc"] + [Var("descriptor", PointerType(PrimType(INDEX)))]
        self.operands = [_flat(p, kind) for p, kind in zip(self.params, (dtype, dtype, dtype, INDEX), strict=True)]
        self.a, self.b, self.c, self.descriptor = self.operands
        self.a_panel, a_allocation = stack_buffer(max(strips, 1) * DEPTH * self.pitch, dtype, "a_panel")
        self.tile, tile_allocation = stack_buffer(self.rows * self.columns, dtype, "tile")
        self.allocations = (a_allocation, tile_allocation)
        self.b_panels = self.b
        if not strips:
            self.b_panels, b_allocation = stack_buffer(DEPTH * tile.panels * self.columns, dtype, "b_panels")
            self.allocations = (b_allocation, *self.allocations)

    @property
    def heights(self) -> tuple[int, ...]:
        """See :class:`RegisterTile`."""
        return self._shape.heights

    @property
    def rows(self) -> int:
        """Rows of the whole register tile."""
        return self._shape.rows

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self._shape.lanes(self.dtype)

    @property
    def columns(self) -> int:
        """Columns of the register tile."""
        return self._shape.columns(self.dtype)

    @property
    def pitch(self) -> int:
        """Elements from one ``k`` to the next in ``a_panel``: whole vectors."""
        return -(-self.rows // self.lanes) * self.lanes

    def load(self, buffer: Buffer, at: Expr, lanes: int | None = None) -> Expr:
        """Loads a vector."""
        return BufferLoad(buffer, [Ramp(at, const(1), lanes or self.lanes)])

    def store(self, buffer: Buffer, at: Expr, value: Expr, lanes: int | None = None) -> Stmt:
        """Stores a vector."""
        return BufferStore(buffer, value, [Ramp(at, const(1), lanes or self.lanes)])


def _flat(pointer: Var, dtype: str) -> Buffer:
    return tirx.decl_buffer((1 << 40,), dtype, pointer.name, data=pointer, data_alignment=itemsize(dtype))


@dataclass(frozen=True)
class Strip:
    """Rows of the result that are multiplied by every packed panel.

    Attributes:
        target: index of the first element in ``c``.
        depth: terms of this chunk of ``k``.
        count: rows.
        width: columns of the block.
        onto: 1 if the products are added to ``c``, else 0.
        packed: index of the strip's rows in ``a_panel``.
    """

    target: Expr
    depth: Var
    count: Var
    width: Var
    onto: Var
    packed: Expr


def multiply_tile(g: Buffers, scope: LoopScope, panel: Var, strip: Strip, source: Expr) -> None:
    """Multiplies the strip by the panel at index ``source``, in the smallest register tile that holds the rows."""
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
    """A tile of ``rows`` rows and ``valid`` valid columns, at index ``target`` of ``c``."""

    def __init__(self, g: Buffers, rows: int, strip: Strip, target: Var, valid: Var) -> None:
        self.g, self.rows, self.strip, self.target, self.valid = g, rows, strip, target, valid
        self.sums, self.allocation = stack_buffer(rows * g.columns, g.dtype, f"sums{rows}")
        self.parts = [(i, vector) for i in range(rows) for vector in range(VECTORS)]

    def _part(self, i: int, vector: int) -> Expr:
        return const(i * self.g.columns + vector * self.g.lanes)

    def multiply(self, source: Var) -> Stmt:
        """Computes the sums of a chunk of ``k``, stores or adds them to the result; ``source``: the panel's index."""
        g, sums, part = self.g, self.sums, self._part
        zero = Emitter(g.lanes).const(0.0, g.dtype)
        scope = LoopScope()
        scope.add(self.allocation, *(g.store(sums, part(*which), zero) for which in self.parts))

        def term(body: LoopScope, k: Var) -> None:
            emit = Emitter(g.lanes)
            start = source + k * const(g.columns)
            b = [emit.bind(g.load(g.b_panels, start + const(v * g.lanes))) for v in range(VECTORS)]
            for i in range(self.rows):
                at = self.strip.packed + k * const(g.pitch) + const(i)
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
        """Stores the whole tile, in vectors."""
        g, stmts = self.g, []
        for i, vector in self.parts:
            at = self.target + const(i) * g.field["c_row"] + const(vector * g.lanes)
            value = g.load(self.sums, self._part(i, vector))
            stmts.append(g.store(g.c, at, _added(g.load(g.c, at), value, add)))
        return SeqStmt(stmts)

    def _store_edge(self, add: bool) -> Stmt:
        """Stores the valid part of the tile, element by element."""
        g = self.g

        def line(body: LoopScope, i: Var) -> None:
            start = body.name(self.target + i * g.field["c_row"], "start")

            def element(innermost: LoopScope, j: Var) -> None:
                value = BufferLoad(g.tile, [i * const(g.columns) + j])
                at = start + j
                innermost.add(BufferStore(g.c, _added(BufferLoad(g.c, [at]), value, add), [at]))

            body.add(loop(self.valid, element))

        return loop(self.strip.count, line)


def _added(old: Expr, value: Expr, add: bool) -> Expr:
    return old + value if add else value


def pack_b(g: Buffers, scope: LoopScope, panel: Var, source: Expr, depth: Var, width: Var, target: Expr) -> None:
    """Packs one panel: ``depth`` lines from index ``source`` of ``b`` on, of ``width`` columns, to index ``target``."""
    step, across = g.field["b_row"], g.field["b_column"]
    column = scope.name(panel * const(g.columns), "column")
    source = scope.name(source + column * across, "source")
    target = scope.name(target, "target")
    valid = scope.name(smaller(width - column, const(g.columns)), "valid")
    full = tirx.EQ(valid, const(g.columns))

    def vectors(body: LoopScope, k: Var) -> None:
        for vector in range(VECTORS):
            shift = const(vector * g.lanes)
            value = g.load(g.b, source + k * step + shift)
            body.add(g.store(g.b_panels, target + k * const(g.columns) + shift, value))

    def elements(begin: Expr) -> Stmt:
        lines = (g.b, source, step, across), (g.b_panels, lambda at: target + at * const(g.columns))
        return _elements(begin, depth, valid, *lines)

    turned = LoopScope()
    squares = turned.name(tirx.truncdiv(depth, const(g.lanes)), "squares")

    def square(body: LoopScope, index: Var) -> None:
        for vector in range(VECTORS):
            begin = source + const(vector * g.lanes) * across + index * const(g.lanes)
            to = target + index * const(g.lanes * g.columns) + const(vector * g.lanes)
            last = const(g.lanes - 1)
            body.add(transpose(g.dtype, (g.b, begin), across, last, (g.b_panels, to), g.columns))

    turned.add(loop(squares, square), elements(squares * const(g.lanes)))
    dense, along = tirx.And(full, tirx.EQ(across, const(1))), tirx.And(full, tirx.EQ(step, const(1)))
    scope.add(IfThenElse(dense, loop(depth, vectors), IfThenElse(along, turned.body, elements(const(0)))))


def pack_a(g: Buffers, scope: LoopScope, source: Expr, depth: Var, count: Var, target: Expr) -> None:
    """Packs ``count`` rows of ``a``, of ``depth`` elements each, from index ``source`` on, to index ``target``."""
    row, step = g.field["a_row"], g.field["a_column"]
    source = scope.name(source, "source")
    pitch = const(g.pitch)

    def elements(begin: Expr) -> Stmt:
        return _elements(begin, depth, count, (g.a, source, step, row), (g.a_panel, lambda at: target + at * pitch))

    turned = LoopScope()
    squares = turned.name(tirx.truncdiv(depth, const(g.lanes)), "squares")

    def square(body: LoopScope, index: Var) -> None:
        # Rows after the last one repeat it: they are read, and their results are not stored.
        for vector in range(g.pitch // g.lanes):
            below = const(vector * g.lanes)
            last = count - const(1) - below
            last = tirx.Select(last < const(0), const(0), last)
            begin = source + smaller(below, count - const(1)) * row + index * const(g.lanes)
            to = target + index * const(g.lanes * g.pitch) + below
            body.add(transpose(g.dtype, (g.a, begin), row, last, (g.a_panel, to), g.pitch))

    turned.add(loop(squares, square), elements(squares * const(g.lanes)))
    full = tirx.And(tirx.EQ(row, const(1)), tirx.EQ(count, const(g.rows)))

    def vectors(body: LoopScope, k: Var) -> None:
        # The second half vector ends with the last row, so that nothing after it is read.
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
    """Packs lines ``begin`` to ``depth``, element by element.

    Args:
        count: elements of a line.
        lines: the source: a buffer, its first index, the strides from line to line and within a line.
        panel: the target: a buffer, and a function from a line to its first index.
    """
    source, first, step, across = lines
    target, start = panel

    def line(body: LoopScope, k: Var) -> None:
        at = body.name(begin + k, "at")

        def element(innermost: LoopScope, j: Var) -> None:
            value = BufferLoad(source, [first + at * step + j * across])
            innermost.add(BufferStore(target, value, [start(at) + j]))

        body.add(loop(count, element))

    return loop(depth - begin, line)
