"""Special points: element type → values, pairs, rows at which operators have kinks, poles, overflow or ties."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")

UPSTREAM = (1.0, -2.0, 0.0, INF, NAN)
"""Gradients of the result, each with every point."""


def _extremes(dtype: torch.dtype) -> list[float]:
    """Around the ends of a type: subnormal, smallest normal, largest; where exp overflows or vanishes; beside 1."""
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    overflow = torch.tensor(info.max, dtype=torch.float64).log().item()
    underflow = torch.tensor(info.smallest_normal, dtype=torch.float64).log().item()
    ends = [subnormal, info.smallest_normal / 100, info.smallest_normal, info.max / 3.4, info.max, info.max**0.5]
    around = [overflow - 0.1, overflow + 0.3, -underflow, 1 + info.eps, 1 - info.eps / 2, info.smallest_normal**0.5]
    return [*ends, *around, underflow - 20]


def few(dtype: torch.dtype) -> list[float]:
    """Points few enough for a cross product of three."""
    info = torch.finfo(dtype)
    return [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, info.smallest_normal * info.eps, info.max / 3.4, INF, -INF, NAN]


def values(dtype: torch.dtype) -> list[float]:
    """The special points of functions of one element."""
    plain = [0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0, 100.0, 0.1, 1e-8, 1e-4, 0.75, 1.5, 2.5]
    positive = [*plain, *_extremes(dtype), INF]
    return [*positive, *(-x for x in positive), NAN]


def unit(dtype: torch.dtype) -> list[float]:
    """Probabilities."""
    info = torch.finfo(dtype)
    return [0.0, -0.0, 1.0, 0.5, 0.25, info.smallest_normal * info.eps, info.smallest_normal, 1e-8, 1 - info.eps / 2]


def inner(dtype: torch.dtype) -> list[float]:
    """The special points of functions of two elements, for a cross product."""
    info = torch.finfo(dtype)
    plain = [0.0, 0.5, 1.0, 2.0, 3.0, 1e-8, info.smallest_normal * info.eps, info.smallest_normal]
    positive = [*plain, info.max / 3.4, info.max, 88.7, INF]
    return [*positive, *(-x for x in positive), NAN]


def cross(*columns: Sequence[float]) -> tuple[list[float], ...]:
    """The cross product of columns of values, as columns."""
    return tuple(list(column) for column in zip(*itertools.product(*columns), strict=True))


def pairs(dtype: torch.dtype) -> tuple[list[float], ...]:
    """The cross product of the special points with themselves."""
    return cross(inner(dtype), inner(dtype))


def rows(dtype: torch.dtype) -> Tensor:
    """Rows of four with ties, zeros, infinities, nan, numbers whose squares overflow or vanish."""
    info = torch.finfo(dtype)
    tiny, small, low, large, huge = (
        info.smallest_normal * info.eps,
        info.smallest_normal,
        info.smallest_normal**0.5 / 4,
        info.max**0.5 * 4,
        info.max / 3.4,
    )
    table = [
        [1.0, 2.0, 2.0, 0.0],
        [3.0, 2.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [-0.0, 0.0, -0.0, 0.0],
        [0.0, 3.0, -3.0, 0.0],
        [5.0, 0.0, 0.0, 0.0],
        [-1.0, -2.0, -2.0, -3.0],
        [1.0, 1.0, 1.0, 1.0],
        [0.1, 0.1, 0.1, 0.1],
        [0.5, -0.5, 1.0, -1.0],
        [1.0, 1 + info.eps, 1.0, 1.0],
        [INF, 1.0, -1.0, 0.0],
        [INF, INF, 2.0, 1.0],
        [INF, -INF, 1.0, 2.0],
        [-INF, -INF, -INF, -INF],
        [-INF, 0.0, 1.0, -INF],
        [0.0, -INF, 0.0, 0.0],
        [NAN, 1.0, 2.0, 3.0],
        [1.0, 2.0, 3.0, NAN],
        [NAN, NAN, NAN, NAN],
        [NAN, INF, -INF, 0.0],
        [huge, -huge, huge, 1.0],
        [huge, huge, huge, huge],
        [info.max, info.max, info.max, info.max],
        [info.max, -info.max, 0.0, 0.0],
        [huge, 0.0, 0.0, 0.0],
        [large, -large, 2 * large, 0.0],
        [large, large, large, large],
        [tiny, 0.0, tiny, 0.0],
        [tiny, tiny, tiny, tiny],
        [small, -small, 2 * small, 0.0],
        [low, 2 * low, 3 * low, -low],
        [88.7, 89.0, -104.0, 0.0],
        [-88.7, -89.0, -104.0, -200.0],
        [1e-8, 1.0, 1e-8, 0.0],
    ]
    return torch.tensor(table, dtype=torch.float64).to(dtype)
