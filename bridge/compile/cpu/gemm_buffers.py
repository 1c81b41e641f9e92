"""Sizes and buffers of the generated matrix product: the register tile, packed panels, operands in memory."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.ir import PointerType, PrimType
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr, Ramp, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import stack_buffer
from bridge.compile.codegen.tir import INDEX, const

__all__ = ["DEPTH", "ROWS", "VECTORS", "WIDEST_BLOCK", "Buffers", "columns", "lanes_of", "quotient_up", "smaller"]

ROWS = 14
"""Rows of the register tile: with two vectors of columns, 28 accumulators of AVX-512's 32 registers."""

DEPTH = 256
"""Terms of one chain of multiply-adds."""

WIDEST_BLOCK = 6
"""Panels of a packed block of ``b``: 196 kB, a part of a second-level cache."""

VECTORS = 2
"""Vectors in a row of the register tile."""


def lanes_of(dtype: str) -> int:
    """Elements of a 64-byte vector."""
    return 64 // itemsize(dtype)


def columns(dtype: str) -> int:
    """Columns of the register tile for an element type."""
    return VECTORS * lanes_of(dtype)


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

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.lanes = lanes_of(dtype)
        self.columns = columns(dtype)
        self.pitch = -(-ROWS // self.lanes) * self.lanes
        self.field: Mapping[str, Expr] = {}
        pointer = PointerType(PrimType(dtype))
        self.params = [Var(name, pointer) for name in "abc"] + [Var("descriptor", PointerType(PrimType(INDEX)))]
        self.operands = [_flat(p, kind) for p, kind in zip(self.params, (dtype, dtype, dtype, INDEX), strict=True)]
        self.a, self.b, self.c, self.descriptor = self.operands
        self.b_panels, b_allocation = stack_buffer(DEPTH * WIDEST_BLOCK * self.columns, dtype, "b_panels")
        self.a_panel, a_allocation = stack_buffer(DEPTH * self.pitch, dtype, "a_panel")
        self.tile, tile_allocation = stack_buffer(ROWS * self.columns, dtype, "tile")
        self.allocations = (b_allocation, a_allocation, tile_allocation)

    def load(self, buffer: Buffer, at: Expr, lanes: int | None = None) -> Expr:
        """A vector."""
        return BufferLoad(buffer, [Ramp(at, const(1), lanes or self.lanes)])

    def store(self, buffer: Buffer, at: Expr, value: Expr, lanes: int | None = None) -> Stmt:
        """Stores a vector."""
        return BufferStore(buffer, value, [Ramp(at, const(1), lanes or self.lanes)])


def _flat(pointer: Var, dtype: str) -> Buffer:
    return tirx.decl_buffer((1 << 40,), dtype, pointer.name, data=pointer, data_alignment=itemsize(dtype))
