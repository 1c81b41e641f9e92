"""Interpolations under autocast, whose arguments a GPU's casts to float32 and the processor's does not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE
from tests.sampling import sampled

aten = torch.ops.aten
MODES = {"bilinear": "upsample_bilinear2d", "nearest": "upsample_nearest2d", "bicubic": "upsample_bicubic2d"}


OWN, WIDENED = "the device's own", "to float32"


@pytest.fixture
def cast(request):
    """Autocast of the processor as of a GPU."""
    if request.param == OWN:
        yield
        return
    if DEVICE.type != "cpu":
        pytest.skip("a GPU's autocast does so by itself")
    library = torch.library.Library("aten", "IMPL")

    def widened(operator):
        def run(x, *args):
            with torch.autocast("cpu", enabled=False):
                return operator(x.float(), *args)

        return run

    for name in MODES.values():
        library.impl(name, widened(getattr(aten, name).default), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


class Decoder(nn.Module):
    """Interpolated maps that convolutions with biases read, alone and beside others."""

    def __init__(self, mode, factor):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), nn.Conv2d(8, 4, 1)
        self.mode, self.sizes = mode, {"scale_factor": 2} if factor else {"size": (8, 10)}

    def forward(self, x):
        y = self.first(x)
        wide = F.interpolate(y, mode=self.mode, **self.sizes)
        both = torch.cat((wide, F.interpolate(y.relu(), scale_factor=2)), 1)
        mask = torch.ones(8, 1, 1).to(wide.dtype)
        return self.second(wide), both * mask, self.third(both).float() + both.split((5, 3), 1)[1].amax(1, keepdim=True)


VARYING = {"x": {0: Dim("batch")}}


@pytest.mark.parametrize(
    ("cast", "dims", "mode", "factor"),
    sampled(
        itertools.product((OWN, WIDENED), (None, VARYING), MODES, (True, False)),
        [
            *((cast, None, "bicubic", False) for cast in (OWN, WIDENED)),
            *((cast, VARYING, "bilinear", False) for cast in (OWN, WIDENED)),
            (WIDENED, None, "bilinear", True),
        ],
    ),
    indirect=["cast"],
)
def test_types_and_numbers_are_eagers(mode, factor, dims, cast):
    torch.manual_seed(0)
    eager = Decoder(mode, factor)
    module = copy.deepcopy(eager)
    x = torch.randn(2, 3, 4, 5)
    results = []
    with torch.autocast(DEVICE.type, torch.bfloat16):
        add_tvm_dispatch(module, x, dynamic_shapes=dims)
        for each in (eager, module):
            outputs = each(x)
            loss = sum(y.float().square().sum() for y in outputs)
            results.append([*outputs, *torch.autograd.grad(loss, list(each.parameters()))])
    assert stats(module).hits == 1
    for expected, actual in zip(*results, strict=True):
        assert expected.dtype == actual.dtype
        assert (expected.float() - actual.float()).abs().max() <= 0.02 * expected.float().abs().max()
