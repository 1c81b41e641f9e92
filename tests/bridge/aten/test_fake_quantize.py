"""Fake quantization: torch's kernels and autograd's straight-through formula, with eager's bits; observers included."""

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import default_fake_quant, default_fused_act_fake_quant, default_weight_fake_quant

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Call, Function, assert_same, run
from tests.device import DEVICE
from tests.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore")

SCALES, ZEROS = torch.linspace(0.01, 0.1, 5), torch.arange(5)
SCALE, ZERO = torch.tensor([0.07]), torch.tensor([3.0])

FORMS = {
    "a tensor": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, -20, 20), ()),
    "by a tensor": (
        lambda x, scale, zero: torch.fake_quantize_per_tensor_affine(x, scale, zero, -20, 20),
        (SCALES[3], ZEROS[2].int()),
    ),
    "channels": (
        lambda x, scales, zeros: torch.fake_quantize_per_channel_affine(x, scales, zeros, 1, -20, 20),
        (SCALES, ZEROS.int()),
    ),
    "a learned scale": (
        lambda x, scale, zero: torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -20, 20, 0.5),
        (SCALE.requires_grad_(), ZERO.requires_grad_()),
    ),
    "learned scales": (
        lambda x, scales, zeros: torch._fake_quantize_learnable_per_channel_affine(x, scales, zeros, 1, -20, 20, 0.5),
        (SCALES.clone().requires_grad_(), ZEROS.float().requires_grad_()),
    ),
    "by hand": (lambda x: x + ((x / 0.05).round().clamp(-20, 20) * 0.05 - x).detach(), ()),
}


def compare(module, call):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, call.args)
    for _ in range(2):
        assert_same(run(module, call), run(eager, call), rtol=0, atol=0)
    assert stats(module).hits == 2


@pytest.mark.parametrize("form", FORMS)
def test_bits_and_gradients_are_eagers(form):
    function, rest = FORMS[form]
    torch.manual_seed(0)
    compare(Function(function), Call((torch.randn(6, 5, requires_grad=True), *rest)))


OBSERVERS = [default_fake_quant, default_fused_act_fake_quant, default_weight_fake_quant]


@pytest.mark.parametrize("make", sampled(OBSERVERS, OBSERVERS[:2]))
def test_observers_move_as_in_eager(make):
    torch.manual_seed(0)
    module, x = make().train().to(DEVICE), torch.randn(6, 5, requires_grad=True)
    module(x)  # from here on its buffers have their shapes
    compare(nn.Sequential(module), Call((x,)))


def test_an_observer_that_is_switched_off_is_another_branch():
    module, x = default_fake_quant().train().to(DEVICE), torch.randn(6, 5)
    module(x)
    model = add_tvm_dispatch(nn.Sequential(module), x)
    module.disable_observer()
    eager = copy.deepcopy(model)
    torch.testing.assert_close(model(3 * x), eager(3 * x), rtol=0, atol=0)
    assert any("observer_enabled" in reason for reason in stats(model).misses)
