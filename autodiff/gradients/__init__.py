"""Gradient rules for Relax operators and library functions: a call -> its partial gradients."""

from autodiff.gradients import elementwise, library, tensors  # noqa: F401
from autodiff.gradients.registry import differentiable, gradient, unsupported

__all__ = ["differentiable", "gradient", "unsupported"]
