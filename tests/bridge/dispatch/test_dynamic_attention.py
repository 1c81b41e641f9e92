"""Attention that drops out, at sizes that vary, with every torch: eager's draws and numbers from one entry."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.__version__ < "2.13", reason="products of older versions fix the sizes there"
)


class Attention(nn.Module):
    def __init__(self, form: str):
        super().__init__()
        self.form, self.heads = form, nn.Linear(12, 3 * 12, dtype=torch.float64)

    def forward(self, x, seen):
        query, key, value = self.heads(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        form = {
            "plain": {},
            "causal": {"is_causal": True},
            "seen": {"attn_mask": seen[:, None, None, :]},
            "added": {"attn_mask": torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -9.0)[:, None, None, :]},
        }[self.form]
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.3, **form)


def given(batch: int, length: int):
    x = torch.linspace(-1, 1, batch * length * 12, dtype=torch.float64).view(batch, length, 12)
    seen = (torch.arange(batch * length).view(batch, length) % 5 > 0) | (torch.arange(length) == 1)
    return x.to(DEVICE), seen.to(DEVICE)


@pytest.mark.parametrize("form", sampled(["plain", "causal", "seen", "added"], ["causal", "added"]))
def test_draws_and_gradients(form):
    torch.manual_seed(0)
    eager, ours = Attention(form).to(DEVICE), Attention(form).to(DEVICE)
    ours.load_state_dict(eager.state_dict())
    batch, length = Dim("batch"), Dim("length")
    add_tvm_dispatch(ours, given(3, 7), dynamic_shapes=({0: batch, 1: length},) * 2)
    found = []
    for module in (eager, ours):
        torch.manual_seed(1)
        outputs = [module(*given(*sizes)) for sizes in ((3, 7), (2, 11), (5, 4))]
        found.append([*outputs, *torch.autograd.grad(sum(map(torch.sum, outputs)), [*module.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert stats(ours).hits == 3 and len(stats(ours).entries) == 1, stats(ours)
