"""Tables that numbers alone decide (indices of a triangle, windows) are constants with torch's own values."""

import pytest
import torch
from torch import nn

from tests.bridge.compare import check_module

TABLES = (
    "torch.tril_indices(4, 4, -1)[0, :5]",
    "torch.triu_indices(4, 4, 1)[1, :5]",
    "torch.hamming_window(5)",
    "torch.hamming_window(5, False, 0.5)",
    "torch.blackman_window(5)",
    "torch.bartlett_window(5, periodic=False)",
    "torch.hann_window(5, device=x.device)",
    "torch.kaiser_window(5, True, 3.0)",
    "torch.fft.fftfreq(5, 0.5)",
    "torch.fft.rfftfreq(8)",
)


@pytest.mark.cpu("tables without a device are on the CPU, in eager too")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables(dtype):
    class Tables(nn.Module):
        def forward(self, x):
            return tuple(x * eval(text) for text in TABLES), torch.tril_indices(3, 3)

    check_module(Tables, lambda: torch.randn(5, requires_grad=True), dtype=dtype)
