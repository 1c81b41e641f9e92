"""Sizes and buffers of the generated matrix product: the register tile, packed panels, operands in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.target import Target
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, Ramp, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import stack_buffer
from bridge.compile.codegen.tir import INDEX, const

__all__ = [
    "DEPTH",
    "NARROW",
    "VECTORS",
    "WIDE",
    "Buffers",
    "RegisterTile",
    "quotient_up",
    "register_tile",
    "smaller",
]

DEPTH = 256
"""Terms of one chain of multiply-adds."""

VECTORS = 2
"""Vectors in a row of the register tile."""


@dataclass(frozen=True)
class RegisterTile:
    """The part of a result whose sums stay in registers, of a processor's vector registers.

    Attributes:
        heights: rows, ascending: the last rows of a block use the smallest that holds them. The last is the tile's.
        vector: bytes of a vector register.
        panels: of a packed block of ``b``, at most: 196 kB, a part of a second-level cache.
        strips: of ``a`` that meet a panel of a ``b`` that was packed before, at most: 224 kB of float32. Each block of
            so many reads ``b`` from where it lies; with a third of them, a weight of 768 x 3072 cost a tenth more.
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


def register_tile(target: Target) -> RegisterTile | None:
    """The tile for a processor; ``None`` for one without fused multiply-adds of vectors."""

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
    """Everything that the code of a product reads and writes.

    Attributes:
        params: the kernel's parameters, pointers to ``a``, ``b``, ``c`` and the descriptor.
        operands: those four as flat buffers.
        b_panels, a_panel: packed operands, ``[panel][k][column]`` and ``[k][row]``, so that the innermost loop reads
            both front to back.
        tile: the register tile at the edge of the result, before the part that exists is stored.
        allocations: statements that make the three.
        pitch: elements from one ``k`` to the next in ``a_panel``: whole vectors.
        field: the descriptor's fields, once the kernel has read them.
    """

    def __init__(self, dtype: str, tile: RegisterTile, strips: int = 0) -> None:
        """``strips``: of ``a`` that are packed at once where ``b`` comes in panels; 0 where it does not."""
        self.dtype = dtype
        self.heights, self.rows = tile.heights, tile.rows
        self.lanes = tile.lanes(dtype)
        self.columns = tile.columns(dtype)
        self.pitch = -(-self.rows // self.lanes) * self.lanes
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

    def load(self, buffer: Buffer, at: Expr, lanes: int | None = None) -> Expr:
        """A vector."""
        return BufferLoad(buffer, [Ramp(at, const(1), lanes or self.lanes)])

    def store(self, buffer: Buffer, at: Expr, value: Expr, lanes: int | None = None) -> Stmt:
        """Stores a vector."""
        return BufferStore(buffer, value, [Ramp(at, const(1), lanes or self.lanes)])


def _flat(pointer: Var, dtype: str) -> Buffer:
    return tirx.decl_buffer((1 << 40,), dtype, pointer.name, data=pointer, data_alignment=itemsize(dtype))
