"""Gradient rules for Relax operators: those TVM lacks, and those it has wrong or inexact."""

from autodiff.gradients import binary, elementwise, library, shapes
from autodiff.gradients.registry import differentiable, gradient, library_gradient, register, undifferentiable_argument

__all__ = [
    "binary",
    "differentiable",
    "elementwise",
    "gradient",
    "library",
    "library_gradient",
    "register",
    "shapes",
    "undifferentiable_argument",
]
