"""Kernels of the user's own in forward: refused by name, or operators; never run on tensors that have no memory."""

import pytest
import torch

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.models import Applied
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

triton = pytest.importorskip("triton", reason="no Triton here")
import triton.language as tl  # noqa: E402

pytestmark = ON_A_GPU


@triton.jit
def doubled_kernel(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)


def launched(x):
    y = torch.empty_like(x)
    doubled_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


class Doubled(torch.autograd.Function):
    """As libraries of fused layers write them."""

    @staticmethod
    def forward(ctx, x):
        return launched(x)

    @staticmethod
    def backward(ctx, grad):
        return launched(grad)


@torch.library.custom_op("bridge_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return launched(x)


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: doubled(grad))


@pytest.mark.parametrize("function", [launched, Doubled.apply, doubled], ids=["launched", "function", "operator"])
def test_eagers_numbers_or_a_refusal(function):
    module, eager, x = (
        Applied(function, 16).to(DEVICE),
        Applied(function, 16).to(DEVICE),
        torch.randn(8, 16, device=DEVICE),
    )
    eager.load_state_dict(module.state_dict())
    refused = ""
    try:
        add_tvm_dispatch(module, x)
    except UnsupportedModule as error:
        refused = str(error)
    for each in (module, eager):
        made = each(x)
        if made.requires_grad:  # of a kernel that is merely launched, autograd knows nothing
            made.sum().backward()
    torch.cuda.synchronize()  # an address that is none has ended the process's work by now
    torch.testing.assert_close(module(x), eager(x))
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    if refused:
        assert "Tensor.data_ptr" in refused or "autograd.Function" in refused
    else:
        assert stats(module).hits
