"""Numbers that change from call to call, on a GPU: one entry takes them all, beside eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


class Annealed(nn.Module):
    """Arguments and an attribute that scale and shift, between products and draws."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.beta = 0.0

    def forward(self, x, temperature=1.0, count: int = 2):
        y = F.dropout(self.linear(x), 0.2) / temperature
        return (count * y + self.beta * (1 - self.beta / 2)).softmax(-1) + 2 * self.beta


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_entry_takes_all_numbers(dtype):
    torch.manual_seed(0)
    module = Annealed().to(DEVICE, dtype)
    eager = copy.deepcopy(module)
    x = torch.randn(5, 8, device=DEVICE, dtype=dtype, requires_grad=True)
    add_tvm_dispatch(module, (x, 1.0, 2), on_miss="compile")
    for step in range(12):
        for each in (module, eager):
            each.beta = step / 12
        call = Call((x, 0.3 + step), {"count": step})
        tolerance = {"rtol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        assert_same(run(module, call, seed=step), run(eager, call, seed=step), **tolerance)
    assert stats(module).hits == 12 and len(stats(module).entries) == 1
    (entry,) = stats(module).entries
    assert len(entry.guard.numbers) == 3
