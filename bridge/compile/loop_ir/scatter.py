"""Scatter plan: rows added up where their indices say, as plain data for a backend's kernel."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.compile.loop_ir.access import Number, counting_dtype

__all__ = ["ScatterPlan"]


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
