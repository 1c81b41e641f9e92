"""Symbolic extents: sizes that are known when a program is bound, as integers that Python code computes with."""

from autodiff.extents.extent import (
    Dim,
    Extent,
    ExtentScope,
    from_tir,
    is_symbol,
    maximum,
    minimum,
    sample_of,
    symbols_alive,
)
from autodiff.extents.guard import SizeGuard
from autodiff.extents.polynomial import Composite, Symbol
from autodiff.extents.proofs import at_most, below, content, divides, same
from autodiff.extents.shapes import Slice, broadcast, same_shape, slice_of
from autodiff.extents.state import ScopeState, scope_of_state, state_of_scope

__all__ = [
    "Composite",
    "Dim",
    "Extent",
    "ExtentScope",
    "ScopeState",
    "SizeGuard",
    "Slice",
    "Symbol",
    "at_most",
    "below",
    "broadcast",
    "content",
    "divides",
    "from_tir",
    "is_symbol",
    "maximum",
    "minimum",
    "same",
    "same_shape",
    "sample_of",
    "scope_of_state",
    "slice_of",
    "state_of_scope",
    "symbols_alive",
]
