"""Symbolic extents: sizes that are known when a program is bound, as integers that Python code computes with."""

from autodiff.extents.extent import Dim, Extent, ExtentScope, from_tir, is_symbol, maximum, minimum, sample_of
from autodiff.extents.guard import Guard
from autodiff.extents.proofs import below, divides, same

__all__ = [
    "Dim",
    "Extent",
    "ExtentScope",
    "Guard",
    "below",
    "divides",
    "from_tir",
    "is_symbol",
    "maximum",
    "minimum",
    "same",
    "sample_of",
]
