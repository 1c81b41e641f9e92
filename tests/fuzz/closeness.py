"""Two values → their distance, and whether it is a few roundings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fuzz.verdict import Wrong

FLOOR_ULPS = 64
"""Rounding units of a tensor's largest element that are always allowed."""


def matches(name: str, got: Any, want: Any, where: str) -> bool:
    """Whether two values agree up to a few roundings. Anything but numbers must agree exactly."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        if type(got) is not type(want) or (want is not None and got != want):
            raise Wrong(f"{where}: {name} is {_brief(got)}, eager's is {_brief(want)}")
        return True
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Wrong(f"{where}: {name} is {_brief(got)}, eager's is {_brief(want)}")
    if not want.is_floating_point():
        return torch.equal(got, want)
    return distance(got, want) <= floor(want)


def floor(value: Tensor) -> float:
    """The always allowed difference; zero for exact types."""
    if not value.is_floating_point():
        return 0.0
    return FLOOR_ULPS * torch.finfo(value.dtype).eps * _largest(value.double())


def distance(got: Tensor | None, want: Tensor | None) -> float:
    """The largest difference, in float64; infinite where one is finite and the other is not, or one is absent."""
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, 0.0, (got - want).abs())
    if not difference.numel():
        return 0.0
    return float(difference.nan_to_num(nan=float("inf")).max())


def kind(value: Tensor) -> Tensor:
    """0 finite, 1 and -1 infinite, 2 nan."""
    return torch.where(value.isnan(), 2, torch.where(value.isinf(), value.sign(), 0)).nan_to_num().to(torch.int8)


def finite_distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of elements that are finite in both."""
    difference = (one - other).abs()[one.isfinite() & other.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def identical(one: Any, other: Any) -> bool:
    """Whether all elements, or two other values, are equal; nan is itself."""
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if isinstance(one, Tensor) else one == other


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _brief(value: Any) -> str:
    return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
