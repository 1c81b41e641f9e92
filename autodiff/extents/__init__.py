"""Symbolic extents: sizes that are known when a program is bound, as integers that Python code computes with."""

from autodiff.extents.extent import (
    Dim,
    Extent,
    ExtentScope,
    ScopeState,
    from_tir,
    is_symbol,
    maximum,
    minimum,
    sample_of,
    scope_of_state,
    state_of_scope,
    symbols_alive,
)
from autodiff.extents.polynomial import Composite, SizeGuard, Symbol
from autodiff.extents.shapes import Slice, at_most, below, broadcast, content, divides, same, same_shape, slice_of

__all__ = ["Composite", "Dim", "Extent", "ExtentScope", "ScopeState", "SizeGuard", "Slice", "Symbol", "at_most"]
__all__ += ["below", "broadcast", "content", "divides", "from_tir", "is_symbol", "maximum", "minimum", "same"]
__all__ += ["same_shape", "sample_of", "scope_of_state", "slice_of", "state_of_scope", "symbols_alive"]
