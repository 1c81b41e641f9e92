"""Symbolic extents: sizes that are known when a program is bound, as integers that Python code computes with."""

from autodiff.extents.extent import Dim, Extent, ExtentScope, Guard, from_tir, maximum, minimum, sample_of

__all__ = ["Dim", "Extent", "ExtentScope", "Guard", "from_tir", "maximum", "minimum", "sample_of"]
