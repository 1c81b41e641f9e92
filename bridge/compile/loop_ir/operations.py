"""Operations of the loop IR beyond point-wise ones: products, lookups, scatters, pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autodiff.extents import Dim, same, same_shape, sample_of
from bridge.compile.loop_ir.views import View

__all__ = ["FIELDS", "Access", "Argument", "Geometry", "LookupPlan", "Number", "PackPlan", "Packing", "PoolPlan"]
__all__ += ["ProductPlan", "ScatterPlan", "Term", "counting_dtype"]


@dataclass(frozen=True)
class Argument:
    """The launch's integer at ``index``."""

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
    """Index of an element of a row from its column coordinates: ``offset + terms + coordinates * columns``."""

    offset: Number
    terms: tuple[Term, ...]
    columns: tuple[Number, ...]


def counting_dtype(*counts: int) -> str:
    """An integer type for ``counts`` and a few thousand beyond: a launch's last threads exceed the extent."""
    return "int32" if max(counts) < 2**31 - 2**13 else "int64"


@dataclass(frozen=True)
class LookupPlan:
    """``out[i] = table[indices[i]]``. An out-of-range index is an error, as in eager.

    Attributes:
        dtype: element type of the table; ``index_dtype``: of the indices.
        length: number of indices, a constant or launch argument; ``table``: its rows; ``columns``: elements of a row.
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
        """An integer type that counts elements."""
        if not isinstance(self.length, int):
            return "int64"
        return counting_dtype(self.length * self.columns, self.table * self.columns)


@dataclass(frozen=True)
class PoolPlan:
    """``dx[n, h, w, c]``: the sum of ``grad[n, i, j, c]`` over the windows whose maximum is at ``h * W + w``.

    Windows are visited in row-major order, as eager's kernel adds them; half types are added in float32.

    Attributes:
        dtype: element type of gradients; places are int64.
        batch, channels: extents; ``image``: height and width of ``x``; ``windows``: their number per axis.
        kernel, stride, padding, dilation: of a window, per axis.
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
        """The distance between the first and the last element of a window."""
        return self.dilation[axis] * (self.kernel[axis] - 1)

    def overlapping(self, axis: int) -> int:
        """The maximum number of windows that span an element."""
        return min(self.windows[axis], self.reach(axis) // self.stride[axis] + 1)


@dataclass(frozen=True)
class ScatterPlan:
    """``table[v]``: the sum of ``rows[i]`` over all ``i`` with ``indices[i] == v``; zeros if there is none.

    The order of a row's summands follows from their places ``i`` alone; half types are added in float32.

    Attributes:
        dtype: element type of rows and table.
        index_dtype: of the indices.
        length: number of rows, a constant or launch argument; ``table``: its rows; ``columns``: elements of a row.
        skipped: the table row that stays zero, or ``None``.
        wraps: whether negative indices count from the end.
        is_sorted: whether sorted keys, and one larger than all, replace indices. A key: ``index * length + place``.
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
        """An integer type that counts elements, and keys of index and place."""
        if not isinstance(self.length, int):
            return "int64"
        keys = (self.table + 1) * self.length
        return counting_dtype(keys, self.length * self.columns, self.table * self.columns)


FIELDS = (
    *("outer", "inner", "m", "n", "k"),
    *("a_outer", "a_inner", "a_row", "a_column"),
    *("b_outer", "b_inner", "b_row", "b_column"),
    *("c_outer", "c_inner", "c_row"),
    *("block_rows", "block_columns", "strip_rows"),
)
"""Descriptor, int64: ``c[o, i] = a[o, i] @ b[o, i]`` for two batch extents, strides in elements (a result's rows are
dense), the block of one task, rows per packed panel (0: not packed)."""

Strides = tuple[Dim, ...]


@dataclass(frozen=True)
class Geometry:
    """Extents ``(outer, inner, m, n, k)``, and strides ``(outer, inner, row, column)`` of each operand.

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
        batch: list[list[Dim]] = []  # (extent, three strides), adjacent axes merged
        for extent, *steps in zip(c.shape[:-2], a.strides, b.strides, c.strides, strict=False):
            if same(extent, 1):
                continue
            if batch and same_shape(batch[-1][1:], [step * extent for step in steps]):
                batch[-1] = [batch[-1][0] * extent, *steps]
            else:
                batch.append([extent, *steps])
        if len(batch) > 2:
            return None
        outer, inner = ([[1, 0, 0, 0]] * 2 + batch)[-2:]
        extents = (outer[0], inner[0], *c.shape[-2:], a.shape[-1])
        strides = [(outer[i], inner[i], *view.strides[-2:]) for i, view in enumerate((a, b, c), start=1)]
        # The stride of an extent of 1 is arbitrary; 1 allows vector loads.
        strides = [
            (*step[:2], *_unit(view.shape[-2:], step[2:])) for step, view in zip(strides, (a, b, c), strict=True)
        ]
        return cls(extents, *strides, a.offset, b.offset)

    def transposed(self) -> Geometry:
        """The geometry of ``c.T = b.T @ a.T``."""
        outer, inner, m, n, k = self.extents
        a, b, c = ((*strides[:2], strides[3], strides[2]) for strides in (self.a, self.b, self.c))
        return Geometry((outer, inner, n, m, k), b, a, c, self.b_offset, self.a_offset)


@dataclass(frozen=True)
class Packing:
    """The packed form of a product's operand ``b``.

    Attributes:
        strip_rows: rows of ``a`` that are multiplied by a panel at once.
        elements: of all panels.
        bound: whether the operand is a constant, packed when a program is bound; otherwise a program packs it.
    """

    strip_rows: int
    elements: int
    bound: bool = False


@dataclass(frozen=True)
class ProductPlan:
    """All parameters of a generated matrix product.

    Attributes:
        way: the algorithm that the backend's policy chose, see :mod:`bridge.compile.schedule.products`.
        element_type: of operands and result; the kernel is specialized for it.
        geometry: extents and strides.
        block: rows and columns of the result that one task computes.
        packing: for a packed ``b``.
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
        """The operands' offsets in elements."""
        return self.geometry.a_offset, self.geometry.b_offset

    def descriptor(self) -> tuple[Dim, ...]:
        """Values of :data:`FIELDS`."""
        geometry = self.geometry
        strip_rows = 0 if self.packing is None else self.packing.strip_rows
        told = (*self.block, strip_rows)
        fields = (*geometry.extents, *geometry.a, *geometry.b, *geometry.c[:3], *told)
        assert len(fields) == len(FIELDS)
        return fields


@dataclass(frozen=True)
class PackPlan:
    """The packing of an operand in generated code: a launch's descriptor describes the product."""

    element_type: str


def _unit(extents: Sequence[Dim], strides: Sequence[Dim]) -> Strides:
    return tuple(1 if same(extent, 1) else stride for extent, stride in zip(extents, strides, strict=True))
