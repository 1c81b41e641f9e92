"""Gradients of a large depthwise convolution's weight by way of channels-last images: torch's numbers."""

from __future__ import annotations

import pytest
import torch

from bridge.library import FUNCTIONS
from bridge.library import convolution as room

CASES = {  # x, weight, stride, padding, dtype, whether by way of channels-last
    "ConvNeXt": ((2, 6, 14, 13), (6, 1, 7, 7), 1, 3, torch.float32, True),
    "stride": ((2, 6, 11, 12), (6, 1, 5, 5), 2, 2, torch.float32, True),
    "small kernel": ((2, 6, 11, 12), (6, 1, 3, 3), 1, 1, torch.float32, False),
    "small image": ((2, 6, 7, 7), (6, 1, 7, 7), 1, 3, torch.float32, False),
    "two filters a channel": ((2, 6, 11, 12), (12, 1, 5, 5), 1, 2, torch.float32, False),
    "one channel": ((2, 1, 11, 12), (1, 1, 5, 5), 1, 2, torch.float32, True),
    "groups": ((2, 6, 11, 12), (6, 2, 5, 5), 1, 2, torch.float32, False),
    "float64": ((2, 6, 11, 12), (6, 1, 5, 5), 1, 2, torch.float64, False),
    "a series": ((2, 6, 11), (6, 1, 5), 1, 2, torch.float32, False),
}


@pytest.mark.cpu("the way by channels-last images is oneDNN's")
@pytest.mark.parametrize("case", CASES)
def test_the_weights_gradient_is_torchs(case, monkeypatch):
    torch.manual_seed(0)
    on, by, stride, padding, kind, is_turned = CASES[case]
    x, weight = torch.randn(on, dtype=kind), torch.randn(by, dtype=kind)
    axes = len(by) - 2
    geometry = [stride] * axes, [padding] * axes, [1] * axes, [0] * axes, 0, on[1] // by[1]
    grad = torch.randn_like(FUNCTIONS["convolution"](x, weight, *geometry))
    turned = []
    was = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, **form: turned.extend(form) or was(self, **form))
    found = FUNCTIONS["convolution_backward_weight"](grad, x, by, *geometry)
    monkeypatch.undo()
    assert bool(turned) is is_turned is room._is_large_depthwise(x, by, geometry)
    leaf = weight.double().requires_grad_()
    wanted = torch.ops.aten.convolution(x.double(), leaf, None, *geometry[:3], False, *geometry[3:4], geometry[5])
    (wanted,) = torch.autograd.grad(wanted, leaf, grad.double())
    assert found.shape == wanted.shape and found.dtype == kind
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5 if kind == torch.float32 else 1e-12, atol=1e-4)
