"""Padding by the library: the matrix, and zeros behind its rows and columns, whichever way it lies."""

from __future__ import annotations

import pytest
import torch

from bridge.library import OUT_KERNELS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("extents", "wide"), [((5, 8), (5, 16)), ((6, 13), (8, 16)), ((13, 16), (16, 16)), ((7, 9), (7, 9))]
)
def test_zeros_behind_rows_and_columns(extents, wide, turned, dtype):
    x = torch.randn(extents[::-1] if turned else extents).to(dtype)
    x = x.t() if turned else x
    out = torch.full(wide, torch.nan, dtype=dtype)
    OUT_KERNELS["pad"]([out], [x])
    expected = torch.zeros(wide, dtype=dtype)
    expected[: extents[0], : extents[1]] = x
    assert torch.equal(out, expected)
