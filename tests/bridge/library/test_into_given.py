"""Library functions that write their results into given memory: the bits of returned results."""

from __future__ import annotations

import pytest
import torch

from bridge.library import FUNCTIONS, INTO_GIVEN, invoke, invoke_into
from bridge.library.registry import TensorAt, TensorsAt
from tests.device import DEVICE

GEOMETRY = ([1, 1], [1, 1], [1, 1], [0, 0], 0)
POOL = ([3, 3], [2, 2], [1, 1], [1, 1], 0)
ON_GPU = DEVICE.type == "cuda"


def planes(*shape, dtype=torch.float32, last=False):
    made = torch.randn(shape, device=DEVICE).to(dtype)
    return made.to(memory_format=torch.channels_last) if last else made


def written(name, tensors, attributes):
    """The function's results, and its writes into given memory; ``None`` if it does not write."""
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
    """cuDNN's results are written into given memory, except where torch chooses the layout in another way."""
    tensors = planes(2, channels, 9, 7, dtype=dtype, last=last), planes(8, inner, 3, 3, dtype=dtype, last=last)
    name = "convolution_last" if last else "convolution"
    expected, made = written(name, tensors, [*GEOMETRY, groups])
    assert made is None or torch.equal(made[0], expected[0])
    if groups == 1 and inner > 1 and not (last and dtype is torch.float64):
        assert (made is not None) == ON_GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_of_a_tensor_in_the_other_layout(dtype):
    """The requested layout follows from the weight."""
    tensors = planes(2, 8, 9, 7, dtype=dtype), planes(8, 8, 3, 3, dtype=dtype)
    expected, made = written("convolution_last", tensors, [*GEOMETRY, 1])
    assert made is None or torch.equal(made[0], expected[0])


STRIDED = {
    "a pixel": ((2, 8, 9, 7), (6, 8, 1, 1)),
    "a channel": ((2, 1, 9, 7), (6, 1, 3, 3)),
    "a pixel of a channel": ((2, 1, 9, 7), (6, 1, 1, 1)),
    "an image of a pixel": ((2, 8, 1, 1), (6, 8, 1, 1)),
    "a result of a channel": ((1, 8, 9, 7), (1, 8, 1, 1)),
    "volumes": ((2, 4, 5, 5, 6), (6, 4, 1, 1, 1)),
}
"""Shapes of which torch takes the layout from strides that say nothing."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shapes", STRIDED.values(), ids=STRIDED)
def test_convolutions_whose_strides_tell_nothing(shapes, dtype):
    """Tensors in either layout, or with strides that fit both."""
    behind = torch.channels_last if len(shapes[0]) == 4 else torch.channels_last_3d
    geometry = [[each] * (len(shapes[0]) - 2) for each in (1, 1, 1, 0)]
    x, weight = planes(*shapes[0], dtype=dtype), planes(*shapes[1], dtype=dtype)
    for name in ("convolution", "convolution_last")[: 1 + (len(shapes[0]) == 4)]:
        bits = []
        for each in (weight, weight.to(memory_format=behind)):
            for given in (x, x.to(memory_format=behind)):
                expected, made = written(name, [given, each], [*geometry, 0, 1])
                assert made is None or torch.equal(made[0], expected[0])
                torch.testing.assert_close(expected[0], bits[0] if bits else expected[0])
                bits.append(expected[0])


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 9, 7), (5, 9, 7), (5, 1, 1), (1, 1, 1), (3, 1, 6)])
@pytest.mark.parametrize("geometry", [POOL, ([1, 1], [1, 1], [0, 0], [1, 1], 0), ([2, 2], [1, 1], [1, 1], [1, 1], 0)])
def test_pooling(channels, height, width, last, geometry):
    """In the layout that torch's kernel writes: it ignores the given memory's layout."""
    x = planes(2, channels, height, width, last=last)
    expected, made = written("max_pool_last", [x], geometry)
    assert made is None or all(map(torch.equal, made, expected))
    assert (made is not None) == (last or x.is_contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x[:1].expand(3, -1, -1, -1)])
def test_pooling_of_a_view(view):
    x = view(planes(2, 10, 9, 7, last=True))
    expected, made = written("max_pool_last", [x], POOL)
    plain, _ = written("max_pool_last", [x.contiguous()], POOL)
    assert made is None and all(map(torch.equal, expected, plain))


def test_pooling_of_a_row_whose_strides_tell_nothing():
    """An extent of 1 may have any stride, and torch looks at it."""
    x = planes(2, 5, 1, 7, last=True)
    odd = x.as_strided(x.shape, (35, 1, 1, 5))
    (expected, made), (plain, _) = (
        written("max_pool_last", [each], ([1, 2], [1, 1], [0, 0], [1, 1], 0)) for each in (odd, x)
    )
    assert made is not None and all(map(torch.equal, made, plain)) and all(map(torch.equal, expected, plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [8, 1, 0])
@pytest.mark.parametrize("shape", [(3, 5), (), (0,)])
def test_embeddings(shape, columns, dtype):
    table, indices = planes(7, columns, dtype=dtype), torch.randint(0, 7, shape, device=DEVICE)
    for each in (indices, indices.int(), indices.expand(2, *shape)):
        expected, made = written("embedding", [table, each], [-1, 0])
        assert torch.equal(made[0], expected[0])


@pytest.mark.parametrize(("dims", "is_written"), [([0], True), ([0, 1], True), ([1], False), ([0, 2], False)])
def test_indexing(dims, is_written):
    """With negative indices, of views, by indices that are broadcast."""
    x = planes(4, 6, 5)
    indices = [torch.randint(-4, 4, (3, 1), device=DEVICE), torch.randint(-4, 4, (2,), device=DEVICE)][: len(dims)]
    for each in (x, x.transpose(0, 1), x[:, ::2]):
        arguments = [TensorAt(0), dims, TensorsAt(1, len(indices))]
        shown = [index.remainder(2) - 1 for index in indices]
        (expected,) = invoke(FUNCTIONS["index"], arguments, [each, *shown])
        out = torch.full_like(expected, -7)
        assert invoke_into(INTO_GIVEN["index"], [out], arguments, [each, *shown]) == is_written
        assert not is_written or torch.equal(out, expected)
