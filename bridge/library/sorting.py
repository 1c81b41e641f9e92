"""Order statistics along an axis: pairs of values and int64 indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge.library.registry import library_function

__all__: list[str] = []


@library_function("sort")
def sort(x, axis, descending, stable):
    return tuple(torch.sort(x, dim=axis, descending=bool(descending), stable=bool(stable)))


@library_function("topk")
def topk(x, axis, k, largest, sorted_):
    return tuple(torch.topk(x, k, axis, bool(largest), bool(sorted_)))


@library_function("kthvalue")
def kthvalue(x, axis, k):
    return tuple(torch.kthvalue(x, k, axis, keepdim=True))


@library_function("cummax")
def cummax(x, axis):
    return tuple(torch.cummax(x, axis))


@library_function("cummin")
def cummin(x, axis):
    return tuple(torch.cummin(x, axis))


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function along an axis that is kept as extent 1."""
    return lambda x, axis: tuple(function(x, axis, keepdim=True))


for _function in (torch.max, torch.min, torch.median, torch.nanmedian, torch.mode):
    library_function(f"{_function.__name__}_dim")(_along(_function))
