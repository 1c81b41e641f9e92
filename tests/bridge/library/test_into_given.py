"""Library functions that write their results into given memory: the bits that they return otherwise."""

from __future__ import annotations

import pytest
import torch

from bridge.library import FUNCTIONS, INTO_GIVEN, invoke, invoke_into
from bridge.library.registry import TensorAt
from tests.device import DEVICE

GEOMETRY = ([1, 1], [1, 1], [1, 1], [0, 0], 0)
POOL = ([3, 3], [2, 2], [1, 1], [1, 1], 0)
ON_GPU = DEVICE.type == "cuda"


def planes(*shape, dtype=torch.float32, last=False):
    made = torch.randn(shape, device=DEVICE).to(dtype)
    return made.to(memory_format=torch.channels_last) if last else made


def written(name, tensors, attributes):
    """What the function returns, and what it writes into memory; ``None`` if it does not."""
    arguments = [*map(TensorAt, range(len(tensors))), *attributes]
    expected = invoke(FUNCTIONS[name], arguments, tensors)
    outs = [torch.full_like(each, -7) for each in expected]
    if not invoke_into(INTO_GIVEN[name], outs, arguments, tensors):
        assert all(bool((out == -7).all()) for out in outs)
        return expected, None
    return expected, outs


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("channels", "inner", "groups"), [(8, 8, 1), (8, 4, 2), (4, 1, 4), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_convolutions(last, channels, inner, groups, dtype):
    """cuDNN's are written; not those whose layout torch chooses in another way."""
    tensors = planes(2, channels, 9, 7, dtype=dtype, last=last), planes(8, inner, 3, 3, dtype=dtype, last=last)
    name = "convolution_last" if last else "convolution"
    expected, made = written(name, tensors, [*GEOMETRY, groups])
    assert made is None or torch.equal(made[0], expected[0])
    if groups == 1 and inner > 1 and not (last and dtype is torch.float64):
        assert (made is not None) == ON_GPU


@pytest.mark.parametrize("channels", [1, 5])
def test_pooling(channels):
    expected, made = written("max_pool_last", [planes(2, channels, 9, 7, last=True)], POOL)
    assert all(map(torch.equal, made, expected))
