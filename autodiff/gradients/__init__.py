"""Gradient rules for Relax operators and library functions: a call -> its partial gradients."""

from autodiff.gradients import elementwise, indexing, library, linalg, reductions, scan, shapes
from autodiff.gradients.registry import differentiable, gradient, library_gradient, unsupported

__all__ = ["differentiable", "elementwise", "gradient", "indexing", "library", "library_gradient", "linalg"]
__all__ += ["reductions", "scan", "shapes", "unsupported"]
