"""``lowered.check()`` on a GPU: every stage against eager there, in the module's type and in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import lower
from tests.bridge.compare import clone_tree
from tests.device import DEVICE, moved
from tests.gpu.cases import CASES, LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]
CHECKED = {
    name: case
    for name, case in {**LAYERS, **CASES}.items()
    if name in ("BertLayer sdpa p=0.1 (3, 17)", "BertLayer eager p=0.1 (3, 17)", "ResNet", "RMSNorm")
}


class Drawing(nn.Module):
    """Draws before the program and inside of it."""

    def forward(self, x):
        kept = F.dropout(x, 0.3) * torch.bernoulli(x.sigmoid())
        return torch.normal(kept, x.exp()) + torch.rand_like(x) * torch.arange(x.shape[-1], device=x.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHECKED)
def test_every_stage_agrees(name, dtype):
    make, sample = CHECKED[name]
    torch.manual_seed(0)
    given = clone_tree(moved(sample()), dtype)
    found = lower(make().to(DEVICE, dtype).train(), given).check()
    assert found.ok, found


def test_draws_inside_and_autocast():
    found = lower(Drawing(), torch.randn(5, 32, device=DEVICE, requires_grad=True)).check()
    assert found.ok, found
    make, sample = LAYERS["BertLayer sdpa p=0.1 (3, 17)"]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        lowered = lower(make().to(DEVICE).train(), moved(sample()))
    found = lowered.check()
    assert found.ok, found
