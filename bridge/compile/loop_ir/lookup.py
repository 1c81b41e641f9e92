"""Lookup plan: rows of a table at indices, as plain data for a backend's kernel."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.compile.loop_ir.access import Number, counting_dtype

__all__ = ["LookupPlan"]


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
