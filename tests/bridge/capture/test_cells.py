"""The formulas of recurrent cells against torch's own cells."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from bridge.base.torch_internals import aten
from bridge.capture.passes.decompositions import CELLS


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("cell", ["lstm_cell", "gru_cell"])
def test_a_cell_is_torchs(cell, biases):
    torch.manual_seed(0)
    gates = 4 if cell == "lstm_cell" else 3
    x, h, c, w_ih, w_hh = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 5), (3, 7), (3, 7), (gates * 7, 5), (gates * 7, 7))
    )
    bias = [torch.randn(gates * 7, dtype=torch.float64, requires_grad=True) for _ in range(2)] if biases else []
    op = getattr(aten, cell).default
    states = [h, c] if gates == 4 else h
    given = [x, states, w_ih, w_hh, *bias]
    ours, eagers = (made if isinstance(made, tuple) else (made,) for made in (CELLS[op](*given), op(*given)))
    assert_close(ours, eagers, rtol=1e-12, atol=1e-12)
    leaves = [x, h, w_ih, w_hh, *bias]
    got, wanted = (torch.autograd.grad([y.sin().sum() for y in ys], leaves) for ys in (ours, eagers))
    assert_close(got, wanted, rtol=1e-12, atol=1e-12)
