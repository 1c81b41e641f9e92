"""Precision of float32 products, for a while: monkeypatch would delete the setting where it should restore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """``precision``: as of :func:`torch.set_float32_matmul_precision`; ``"high"`` is TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
