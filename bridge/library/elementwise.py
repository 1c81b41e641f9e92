"""Elementwise functions that torch computes more exactly than generated code would."""

from __future__ import annotations

import torch

from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__: list[str] = []

for _function in (torch.erfc, torch.exp2, torch.atan2, torch.fmod, torch.remainder):
    library_function(_function.__name__)(_function)


@library_function("divide_floor")
def divide_floor(a, b):
    """The quotient, rounded down."""
    return torch.div(a, b, rounding_mode="floor")


@library_function("divide_trunc")
def divide_trunc(a, b):
    """The quotient, rounded towards zero."""
    return torch.div(a, b, rounding_mode="trunc")


@library_function("binary_cross_entropy", aten.binary_cross_entropy)
def binary_cross_entropy(x, target):
    """Of each element; its logarithms are bounded below by -100."""
    return aten.binary_cross_entropy(x, target, None, 0)
