"""Symbolic extents: sizes that are known when a program is bound, as integers that Python code computes with."""

from autodiff.extents.extent import Dim, Extent, ExtentScope, from_tir, is_symbol, maximum, minimum, sample_of
from autodiff.extents.guard import Guard
from autodiff.extents.polynomial import Composite, Symbol
from autodiff.extents.proofs import below, content, divides, same
from autodiff.extents.state import ScopeState, scope_of_state, state_of_scope

__all__ = [
    "Composite",
    "Dim",
    "Extent",
    "ExtentScope",
    "Guard",
    "ScopeState",
    "Symbol",
    "below",
    "content",
    "divides",
    "from_tir",
    "is_symbol",
    "maximum",
    "minimum",
    "same",
    "sample_of",
    "scope_of_state",
    "state_of_scope",
]
