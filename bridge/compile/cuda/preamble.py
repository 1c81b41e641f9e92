"""Device functions that kernels call, as CUDA C: what stands before the kernels of every module."""

from __future__ import annotations

__all__ = ["PREAMBLE"]

PREAMBLE = ""
