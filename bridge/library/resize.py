"""Interpolation (``upsample``) in every mode, and its VJP; those named ``last`` have channels behind in the results."""

from __future__ import annotations

from typing import Any

from bridge.base.torch_internals import aten
from bridge.library.registry import library_function

__all__: list[str] = []


def _upsampling(mode: str, direction: str, align_corners: int, scales: tuple[float, ...]) -> tuple[Any, list[Any]]:
    """The operator, and the options behind the sizes: ``align_corners`` but for nearest, then one scale per axis."""
    prefix = "_" if "exact" in mode or mode.endswith("aa") else ""
    operator = getattr(aten, f"{prefix}upsample_{mode}{direction}").default
    given = [scale or None for scale in scales]
    return operator, given if mode.startswith("nearest") else [bool(align_corners), *given]


@library_function("upsample")
def upsample(x, mode, output_size, align_corners, *scales):
    operator, options = _upsampling(mode, "", align_corners, scales)
    return operator(x, output_size, *options)


@library_function("upsample_backward")
def upsample_backward(grad, extents, mode, output_size, align_corners, *scales):
    operator, options = _upsampling(mode, "_backward", align_corners, scales)
    return operator(grad, output_size, extents, *options)


@library_function("upsample_last")
def upsample_last(x, *options):
    return upsample(x, *options).permute(0, 2, 3, 1)


@library_function("upsample_last_backward")
def upsample_last_backward(grad, extents, *options):
    return upsample_backward(grad, extents, *options).permute(0, 2, 3, 1)
