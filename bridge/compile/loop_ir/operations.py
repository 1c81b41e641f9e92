"""Operations of the loop IR that are more than point-wise: products, lookups, scatters, pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autodiff.extents import Dim, same, sample_of
from bridge.compile.loop_ir.views import View, alike

__all__ = ["FIELDS", "Access", "Argument", "Geometry", "LookupPlan", "Number", "PackPlan", "Packing", "PoolPlan"]
__all__ += ["ProductPlan", "ScatterPlan", "Term", "counting_dtype"]


@dataclass(frozen=True)
class Argument:
    """The integer at that index of those that a launch passes."""

    index: int


Number = int | Argument


@dataclass(frozen=True)
class Term:
    """``row // below % extent * stride``; 1 below means no division, extent ``None`` no remainder."""

    below: Number
    extent: Number | None
    stride: Number


@dataclass(frozen=True)
class Access:
    """Index of the element of a row at given column coordinates: ``offset + terms + coordinates * columns``."""

    offset: Number
    terms: tuple[Term, ...]
    columns: tuple[Number, ...]


def counting_dtype(*counts: int) -> str:
    """The integers that count so many, and a few thousand more: the last threads of a launch are behind the end."""
    return "int32" if max(counts) < 2**31 - 2**13 else "int64"


@dataclass(frozen=True)
class LookupPlan:
    """``out[i] = table[indices[i]]``. An index outside of the table is an error, as eager's.

    Attributes:
        dtype: element type of the table; ``index_dtype``, of the indices.
        length: how many indices there are, a number or the launch's; ``table``: how many rows; ``columns``: elements of
            each.
        wraps: whether negative indices count from the end.
    """

    dtype: str
    index_dtype: str
    length: Number
    table: int
    columns: int
    wraps: bool = False

    @property
    def place_dtype(self) -> str:
        """The integers that count elements."""
        if not isinstance(self.length, int):
            return "int64"
        return counting_dtype(self.length * self.columns, self.table * self.columns)


@dataclass(frozen=True)
class PoolPlan:
    """``dx[n, h, w, c]``: the sum of ``grad[n, i, j, c]`` over the windows whose maximum is at ``h * W + w``.

    Windows are met row by row, each row in order, as eager's kernel adds them; in float32 for half types.

    Attributes:
        dtype: element type of gradients; places are int64.
        batch, channels: extents; ``image``: height and width of ``x``; ``windows``: how many there are, down and along.
        kernel, stride, padding, dilation: of a window, each down and along.
    """

    dtype: str
    batch: int
    channels: int
    image: tuple[int, int]
    windows: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def reach(self, axis: int) -> int:
        """Elements from the first of a window to the last."""
        return self.dilation[axis] * (self.kernel[axis] - 1)

    def overlapping(self, axis: int) -> int:
        """Windows at most that an element lies between the ends of."""
        return min(self.windows[axis], self.reach(axis) // self.stride[axis] + 1)


@dataclass(frozen=True)
class ScatterPlan:
    """``table[v]``: the sum of ``rows[i]`` over all ``i`` with ``indices[i] == v``; zeros where there is none.

    A row's summands are added in an order that follows from their places ``i`` alone; in float32 for half types.

    Attributes:
        dtype: element type of rows and table.
        index_dtype: of the indices.
        length: how many rows there are, a number or the launch's; ``table``: how many the table has; ``columns``:
            elements of each.
        skipped: the row of the table that stays zero; ``None``: there is none.
        wraps: whether negative indices count from the end.
        is_sorted: whether keys are given, sorted, with one behind them that is larger than all, in the place of
            indices. A key is an index and a place, ``index * length + place``.
    """

    dtype: str
    index_dtype: str
    length: Number
    table: int
    columns: int
    skipped: int | None = None
    wraps: bool = False
    is_sorted: bool = False

    @property
    def key_dtype(self) -> str:
        """The integers that count elements, and pairs of an index and a place."""
        if not isinstance(self.length, int):
            return "int64"
        keys = (self.table + 1) * self.length
        return counting_dtype(keys, self.length * self.columns, self.table * self.columns)


FIELDS = (
    *("outer", "inner", "m", "n", "k"),
    *("a_outer", "a_inner", "a_row", "a_column"),
    *("b_outer", "b_inner", "b_row", "b_column"),
    *("c_outer", "c_inner", "c_row"),
    *("block_rows", "block_columns", "strip_rows", "accumulate"),
)
"""The descriptor, int64: ``c[o, i] = a[o, i] @ b[o, i]`` for two batch extents, strides in elements (a result's row is
dense), the block of one task, rows that meet a packed panel at once (0: nothing is packed), whether ``c`` is added
to."""

Strides = tuple[Dim, ...]


@dataclass(frozen=True)
class Geometry:
    """Extents ``(outer, inner, m, n, k)``, and of each operand the strides ``(outer, inner, row, column)``.

    Offsets and strides count elements; the result has no offset.
    """

    extents: tuple[Dim, ...]
    a: Strides
    b: Strides
    c: Strides
    a_offset: Dim
    b_offset: Dim

    @classmethod
    def of(cls, a: View, b: View, c: View) -> Geometry | None:
        """The geometry of ``c = a @ b``, all batches expanded; ``None`` if the batch needs more than two extents."""
        batch: list[list[Dim]] = []  # extent and the three strides, neighbours that run through merged
        for extent, *steps in zip(c.shape[:-2], a.strides, b.strides, c.strides, strict=False):
            if same(extent, 1):
                continue
            if batch and alike(batch[-1][1:], [step * extent for step in steps]):
                batch[-1] = [batch[-1][0] * extent, *steps]
            else:
                batch.append([extent, *steps])
        if len(batch) > 2:
            return None
        outer, inner = ([[1, 0, 0, 0]] * 2 + batch)[-2:]
        extents = (outer[0], inner[0], *c.shape[-2:], a.shape[-1])
        strides = [(outer[i], inner[i], *view.strides[-2:]) for i, view in enumerate((a, b, c), start=1)]
        # A dimension of extent 1 has no stride to speak of; 1 is the one that is read in vectors.
        strides = [
            (*step[:2], *_unit(view.shape[-2:], step[2:])) for step, view in zip(strides, (a, b, c), strict=True)
        ]
        return cls(extents, *strides, a.offset, b.offset)

    def transposed(self) -> Geometry:
        """That of the transposes, in the other order, whose product is the transposed result."""
        outer, inner, m, n, k = self.extents
        a, b, c = ((*strides[:2], strides[3], strides[2]) for strides in (self.a, self.b, self.c))
        return Geometry((outer, inner, n, m, k), b, a, c, self.b_offset, self.a_offset)


@dataclass(frozen=True)
class Packing:
    """How a product reads an operand ``b`` that is packed before.

    Attributes:
        strip_rows: rows of ``a`` that meet a panel at once.
        elements: of all panels.
        bound: whether the operand is a constant, packed when a program is bound to it; otherwise a program packs it.
    """

    strip_rows: int
    elements: int
    bound: bool = False


@dataclass(frozen=True)
class ProductPlan:
    """How generated code computes a matrix product: all that its kernel is told.

    Attributes:
        way: what the backend's policy chose, see :mod:`bridge.compile.schedule.chain_plan`.
        element_type: of operands and result; the kernel is made for it alone.
        geometry: extents and strides.
        block: rows and columns of the result that one task computes.
        packing: of a product whose ``b`` is packed before.
    """

    way: str
    element_type: str
    geometry: Geometry
    block: tuple[Dim, Dim]
    packing: Packing | None = None

    def __str__(self) -> str:
        rows, width = map(sample_of, self.block)
        return f"{self.way}, {rows} x {width} a task"

    @property
    def offsets(self) -> tuple[Dim, Dim]:
        """Elements before the first one that is read, of each operand."""
        return self.geometry.a_offset, self.geometry.b_offset

    def descriptor(self, accumulate: bool = False) -> tuple[Dim, ...]:
        """Values of :data:`FIELDS`; ``accumulate``: the product is added to what is there."""
        geometry = self.geometry
        strip_rows = 0 if self.packing is None else self.packing.strip_rows
        told = (*self.block, strip_rows, int(accumulate))
        fields = (*geometry.extents, *geometry.a, *geometry.b, *geometry.c[:3], *told)
        assert len(fields) == len(FIELDS)
        return fields


@dataclass(frozen=True)
class PackPlan:
    """How generated code packs an operand: it is told what the product is, in its descriptor."""

    element_type: str


def _unit(extents: Sequence[Dim], strides: Sequence[Dim]) -> Strides:
    return tuple(1 if same(extent, 1) else stride for extent, stride in zip(extents, strides, strict=True))
