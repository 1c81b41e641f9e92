"""Gradient rules for Relax operators: those TVM lacks, and those it has wrong or inexact."""

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
    shapes,
)
from autodiff.gradients.registry import differentiable, gradient, library_gradient, refusal, register

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
    "refusal",
    "register",
    "shapes",
]
