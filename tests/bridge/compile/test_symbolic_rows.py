"""Rows whose length is known at the launch: one kernel for all lengths, with the bits of each one's static kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autodiff.extents import Dim
from bridge.compile.loop_ir.graph import Concat, Graph, Operand, Value, whole
from bridge.compile.loop_ir.views import expand
from tests.bridge.compile.planned_graphs import Builder, assert_static_bits, inputs
from tests.sampling import sampled

LENGTHS = [2, 3, 15, 16, 17, 32, 48, 63, 64, 65, 100, 1000]
FEW = [2, 17, 64, 1000]
"""The least, one behind a vector, a whole tile, and many with a part of one."""

SIZES = [{"n": n, "m": 2 + n % 5} for n in LENGTHS]


def softmax(n: Dim, m: Dim, dtype: str = "float32") -> Graph:
    b = Builder(dtype)
    x = b.param(m, n)
    top = b.reshaped(b.reduce("max", x, m, n, 1, m), m, 1)
    y = b.op("exp", b.op("subtract", x, top))
    total = b.reshaped(b.reduce("sum", y, m, n, 1, m), m, 1)
    return b.graph(b.op("divide", y, total))


def softmax_backward(n: Dim, m: Dim) -> Graph:
    b = Builder()
    y, g = b.param(m, n), b.param(m, n)
    product = b.op("multiply", y, g)
    total = b.reshaped(b.reduce("sum", product, m, n, 1, m), m, 1)
    return b.graph(b.op("multiply", y, b.op("subtract", g, total)), b.op("exp", product))


def layer_norm(n: Dim, m: Dim) -> Graph:
    b = Builder()
    x, weight = b.param(m, n), b.param(n)
    mean = b.op("divide", b.reduce("sum", x, m, n, 1, m), n)
    centred = b.op("subtract", x, b.reshaped(mean, m, 1))
    variance = b.op("divide", b.reduce("sum", b.op("square", centred), m, n, 1, m), n)
    scale = b.op("rsqrt", b.op("add", variance, 1e-5))
    return b.graph(b.op("multiply", b.op("multiply", centred, b.reshaped(scale, m, 1)), weight), mean)


def all_reductions(n: Dim, m: Dim, dtype: str = "float32") -> Graph:
    b = Builder(dtype)
    x = b.param(m, n)
    return b.graph(*(b.reduce(op, x, m, n, 1, m) for op in ("prod", "min", "max", "sum")))


def whole_numbers(n: Dim, m: Dim) -> Graph:
    return all_reductions(n, m, "int64")


def bfloat16(n: Dim, m: Dim) -> Graph:
    return softmax(n, m, "bfloat16")


def float64(n: Dim, m: Dim) -> Graph:
    return softmax(n, m, "float64")


def masked_scores(n: Dim, m: Dim) -> Graph:
    """Attention's softmax over keys, a mask of keys broadcast to heads and queries."""
    b = Builder()
    scores, mask = b.param(m, 3, n, n), b.param(m, n)
    rows = m * 3 * n
    x = b.op("add", scores, b.reshaped(mask, m, 1, 1, n))
    top = b.reshaped(b.reduce("max", x, rows, n, 1, m, 3, n), m, 3, n, 1)
    y = b.op("exp", b.op("subtract", x, top))
    total = b.reshaped(b.reduce("sum", y, rows, n, 1, m, 3, n), m, 3, n, 1)
    return b.graph(b.op("divide", y, total))


def several_loops(n: Dim, m: Dim) -> Graph:
    """Rows of ``n * 64`` elements in two loops: nothing but the last one's extent is a number."""
    b = Builder()
    x, across, along = b.param(m, n, 64), b.param(64), b.param(n)
    y = b.op("add", b.op("multiply", b.op("exp", x), across), b.reshaped(along, n, 1))
    total = b.reshaped(b.reduce("sum", y, m, n * 64, 1, m), m, 1, 1)
    return b.graph(b.op("divide", y, total))


def last_loop(n: Dim, m: Dim) -> Graph:
    """Rows in two loops; the inner extent is symbolic."""
    b = Builder()
    x, across = b.param(m, 40, n), b.param(m, n)
    return b.graph(b.op("exp", b.op("multiply", x, b.reshaped(across, m, 1, n))))


def turned(n: Dim, m: Dim) -> Graph:
    """Rows with a symbolic stride."""
    b = Builder()
    x = b.param(n, m)
    return b.graph(b.op("exp", b.transposed(x, 1, 0)))


def heads(n: Dim, m: Dim) -> Graph:
    b = Builder()
    x = b.param(m, n, 4, 16)
    return b.graph(b.op("tanh", b.transposed(x, 0, 2, 1, 3)), b.op("exp", b.transposed(x, 0, 2, 3, 1)))


def window(n: Dim, m: Dim) -> Graph:
    b = Builder()
    x = b.param(m, n + 2)
    part = b.windowed(x, (m, n), (n + 2, 1), 2)
    return b.graph(b.op("exp", part), b.reduce("sum", part, m, n, 1, m))


def flat(n: Dim, m: Dim) -> Graph:
    b = Builder()
    x, y = b.param(m, n), b.param(m, n)
    return b.graph(b.op("tanh", b.op("multiply", x, y)))


def one_sum(n: Dim, m: Dim) -> Graph:
    b = Builder()
    x = b.param(m, n)
    return b.graph(b.reduce("sum", b.op("exp", x), 1, m * n, 1))


def joined(n: Dim, m: Dim) -> Graph:
    """Sections of a number of elements, and sections whose length is no number."""
    b = Builder()
    x, y = b.param(m, n, 2, 32), b.param(m, n)
    short = [b.windowed(x, (m * n, 1, 32), (64, 32, 1), begin) for begin in (32, 0)]
    long = [b.reshaped(b.op("exp", y), m, 1, n), b.reshaped(y, m, 1, n)]
    results = []
    for parts, shape, inner in ((short, (m * n, 2, 32), 32), (long, (m, 2, n), n)):
        out = Value("joined", shape, "float32")
        b.nodes.append(Concat("concat", tuple(Operand(p.value, expand(p.view, shape)) for p in parts), out, inner))
        results.append(b.op("tanh", whole(out)))
    return b.graph(*results)


GRAPHS = [
    softmax,
    softmax_backward,
    layer_norm,
    all_reductions,
    whole_numbers,
    bfloat16,
    float64,
    masked_scores,
    several_loops,
    last_loop,
    turned,
    heads,
    window,
    flat,
    one_sum,
    joined,
]


@pytest.mark.parametrize("lengths", sampled([FEW, LENGTHS], [FEW]), ids=len)
@pytest.mark.parametrize("make", sampled(GRAPHS, lambda make: make is not float64), ids=lambda make: make.__name__)
def test_every_length_has_the_bits_of_its_static_kernel(make, lengths):
    sizes = [each for each in SIZES if each["n"] in lengths]
    assert_static_bits(make, sizes[: -1 if make is masked_scores else None], n=40, m=12)


@pytest.mark.parametrize("make", [softmax, layer_norm, masked_scores, several_loops], ids=lambda make: make.__name__)
def test_one_kernel(make):
    assert len(assert_static_bits(make, [{"n": 7, "m": 3}], n=40, m=12).planned) == 1


def test_lengths_that_share_a_factor():
    """Of ``n * 64`` elements, the accumulators are known: one loop instead of three."""

    def make(n: Dim, m: Dim) -> Graph:
        return softmax(n * 64, m)

    ours = assert_static_bits(make, [{"n": n, "m": 2} for n in (2, 3, 8)], n=40, m=12)
    assert ours.planned[0].plan.accumulators == (4,)


def test_against_numpy():
    for n in (2, 17, 100):
        ours = assert_static_bits(layer_norm, [{"n": n, "m": 3}], n=40, m=12)
        given = inputs(layer_norm(n, 3))
        x, weight = (tensor.double().numpy() for tensor in given)
        mean = x.mean(1, keepdims=True)
        expected = (x - mean) / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + 1e-5) * weight
        result, means = ours(given, n=n, m=3)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(means.numpy(), mean[:, 0], rtol=1e-5, atol=1e-6)


def test_infinities_and_nan_as_in_the_static_kernel():
    ours = assert_static_bits(all_reductions, [{"n": 5, "m": 2}], n=40, m=12)
    for special in (float("inf"), float("-inf"), float("nan"), -0.0):
        for n in (3, 16, 21):
            x = torch.full((2, n), special)
            _, low, high, total = ours([x], n=n, m=2)
            torch.testing.assert_close(low, x.amin(1), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(high, x.amax(1), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(total, x.sum(1), rtol=0, atol=0, equal_nan=True)
