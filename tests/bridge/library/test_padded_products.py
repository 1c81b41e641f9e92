"""Products of half types in padded memory: the same numbers as without, whichever way operands and result lie."""

from __future__ import annotations

import pytest
import torch

from bridge.library.padded_products import padded_product


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("m, k, n", [(5, 8, 13), (6, 13, 16), (13, 16, 8), (7, 10, 6), (8, 16, 24)])
def test_numbers_are_those_of_a_product(m, k, n, turned):
    """Of small integers, which every order of summation gives exactly."""
    a, b = (
        torch.randint(-4, 5, extents[::-1] if is_turned else extents).bfloat16()
        for extents, is_turned in zip(((m, k), (k, n)), turned, strict=True)
    )
    a, b = (each.t() if is_turned else each for each, is_turned in zip((a, b), turned, strict=True))
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    padded_product(a, b, out)
    assert torch.equal(out, torch.mm(a, b))


def test_an_infinite_number_meets_no_zero():
    a, b = torch.ones(3, 13).bfloat16(), torch.ones(13, 5).bfloat16()
    a[1, 2] = torch.inf
    out = torch.empty(3, 5).bfloat16()
    padded_product(a, b, out)
    assert torch.equal(out, torch.mm(a, b))
