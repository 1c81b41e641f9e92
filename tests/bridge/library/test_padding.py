"""Padding by the library: the matrix, and zeros behind its rows and columns, for either memory order."""

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


@pytest.mark.parametrize("channels", [3, 8, 12])
@pytest.mark.parametrize("begins", [(0, 0, 0, 0), (0, 1, 2, 0), (1, 0, 0, 3)])
def test_a_number_around_a_tensor(begins, channels):
    x = torch.randn(2, 4, 5, channels).bfloat16()
    out = torch.full((3, 6, 8, channels + 3), torch.nan, dtype=x.dtype)
    OUT_KERNELS["pad"]([out], [x], begins, 0.5)
    ends = [wide - begin - own for wide, begin, own in zip(out.shape, begins, x.shape, strict=True)]
    widths = [width for pair in zip(reversed(begins), reversed(ends), strict=True) for width in pair]
    assert torch.equal(out, torch.nn.functional.pad(x, widths, value=0.5))
