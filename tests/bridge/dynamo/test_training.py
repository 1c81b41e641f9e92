"""Training under ``torch.compile(backend="tvm_dispatch")`` beside eager: queues, Functions of a user's own."""

import copy

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch


class Queue(nn.Module):
    """MoCo's: keys are enqueued after the logits have read a clone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.randn(4, 6))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        q = nn.functional.normalize(self.linear(x), dim=1)
        logits = q @ self.queue.clone().detach()
        with torch.no_grad():
            self.queue[:, :3] = q.detach().T
            self.place[0] = 3
        return logits


@pytest.mark.parametrize("way", ["torch.compile", "sample"])
def test_a_queue_that_each_call_fills(way):
    eager, x = Queue(), torch.randn(3, 4)
    module = copy.deepcopy(eager)
    called = torch.compile(module, backend="tvm_dispatch") if way == "torch.compile" else add_tvm_dispatch(module, x)
    for _ in range(3):
        losses = [each(x).square().sum() for each in (called, eager)]
        for each in losses:
            each.backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close([*module.buffers()], [*eager.buffers()])
    torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad, rtol=1e-4, atol=1e-5)


class Differentiates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.sin().sum(), x)
        return grad * slope


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Differentiates.apply(self.linear(x))


def test_a_function_that_differentiates_inside_trains_under_torch_compile_and_is_refused_by_its_name():
    eager, x = Sine(), torch.randn(3, 4)
    module = copy.deepcopy(eager)
    with pytest.raises(UnsupportedModule, match=r"autograd\.Function Differentiates"):
        add_tvm_dispatch(copy.deepcopy(eager), x)
    for each in (torch.compile(module, backend="tvm_dispatch"), eager):
        each(x).square().sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad)
