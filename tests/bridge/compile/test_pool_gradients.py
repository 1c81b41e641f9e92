"""Gradients of pools by the GPU's kernel, run without one: torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bridge import lower
from bridge.compile import CallLibrary, CompileOptions, Launch, compile_function
from bridge.compile.cuda.elements import PoolLaunch
from bridge.compile.loop_ir.operations import PoolPlan
from tests.cuda_plans import FOR_LITTLE, array
from tests.opencl import OpenClKernels

#: kernel, stride, padding, dilation, ceil_mode
GEOMETRIES = {
    "a ResNet's": ((3, 3), (2, 2), (1, 1), (1, 1), False),
    "apart": ((2, 2), (3, 3), (0, 0), (1, 1), False),
    "uneven, beyond the end": ((3, 2), (2, 1), (1, 0), (1, 1), True),
    "dilated": ((2, 3), (1, 2), (1, 1), (2, 1), False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [3, 6])
def test_as_torch_adds_them(dtype, channels):
    plans, tensors, expected = [], [], []
    for kernel, stride, padding, dilation, ceil in GEOMETRIES.values():
        x = torch.randint(-3, 3, (2, channels, 9, 8)).to(dtype).to(memory_format=torch.channels_last)  # ties
        x.requires_grad_()
        y, places = F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)
        grad = torch.randn(y.shape).to(dtype).to(memory_format=torch.channels_last)
        sums = torch.zeros(2, channels, 72, dtype=torch.promote_types(dtype, torch.float32))
        sums.scatter_add_(2, places.flatten(2), grad.flatten(2).to(sums.dtype))
        expected.append(sums.view(2, channels, 9, 8).to(dtype))
        behind = (grad.permute(0, 2, 3, 1), places.permute(0, 2, 3, 1))
        tensors.append([each.contiguous() for each in behind])
        name = str(dtype).removeprefix("torch.")
        plans.append(PoolPlan(name, 2, channels, (9, 8), tuple(y.shape[2:]), kernel, stride, padding, dilation))
    code = OpenClKernels([PoolLaunch(plan).build() for plan in plans])
    for index, (given, wanted) in enumerate(zip(tensors, expected, strict=True)):
        found = torch.full((2, 9, 8, channels), 3, dtype=dtype)
        code(index, [array(each) for each in (*given, found)], ())
        assert torch.equal(found.permute(0, 3, 1, 2), wanted)


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return F.max_pool2d(self.convolution(x).relu(), 3, 2, 1).sin()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_where_channels_lie_behind(memory_format):
    module = Pooled().to(memory_format=memory_format)
    lowered = lower(module, torch.randn(2, 3, 9, 9).to(memory_format=memory_format))
    program = compile_function(lowered.expected_backward, name="backward", options=CompileOptions.current(FOR_LITTLE))
    kinds = {type(step) for step in program.steps if "max_pool" in step.name}
    assert kinds == {Launch if memory_format == torch.channels_last else CallLibrary}
