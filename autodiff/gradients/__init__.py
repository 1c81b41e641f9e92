"""Gradient rules for Relax operators that TVM lacks or has wrong or inexact: a call -> its partial gradients."""

from autodiff.gradients import (
    binary,
    convolutions,
    elementwise,
    indexing,
    kernels,
    library,
    linalg,
    losses,
    normalization,
    operators,
    reductions,
    scan,
    shapes,
)
from autodiff.gradients.registry import differentiable, gradient, library_gradient, register, unsupported

__all__ = [
    "binary",
    "convolutions",
    "differentiable",
    "elementwise",
    "gradient",
    "indexing",
    "kernels",
    "library",
    "library_gradient",
    "linalg",
    "losses",
    "normalization",
    "operators",
    "reductions",
    "register",
    "scan",
    "shapes",
    "unsupported",
]
