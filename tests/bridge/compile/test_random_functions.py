"""Random graphs of point-wise operators, views, reductions and products, against torch; and the bitwise promise."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tvm.relax import op as R

from bridge.compile import compile_function
from tests.bridge.compile.random_functions import OnTorch, build, draw, play, sample
from tests.bridge.compile_helpers import assert_same, function
from tests.sampling import sampled


@pytest.mark.parametrize("seed", sampled(range(24), range(5)))
def test_random_graph(seed):
    inputs, program = draw(seed, 26)
    rng = random.Random(seed)
    count = len(inputs) + len(program)
    wanted = sorted({count - 1, *rng.sample(range(len(inputs), count), 5)})
    ours = compile_function(build(inputs, program, "float64", wanted), name=f"random{seed}")
    tensors = sample(inputs, torch.float64, seed)
    given = [tensor.clone() for tensor in tensors]
    theirs = play(OnTorch(), tensors, program)
    for i, result in zip(wanted, ours(tensors), strict=True):
        assert_same(result, theirs[i].contiguous(), rtol=1e-10, atol=1e-10)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, given, strict=True))


@pytest.mark.parametrize(
    ("seed", "dtype"),
    sampled(
        itertools.product(range(40, 44), [torch.float32, torch.bfloat16, torch.float16]),
        [(40, torch.float32), (40, torch.bfloat16)],
    ),
)
def test_no_bit_depends_on_which_values_are_results(seed, dtype):
    inputs, program = draw(seed, 24)
    count = len(inputs) + len(program)
    name = str(dtype).removeprefix("torch.")
    last = compile_function(build(inputs, program, name, [count - 1]), name="one")
    every = list(range(len(inputs), count))
    all_of_them = compile_function(build(inputs, program, name, every), name="all")
    tensors = sample(inputs, torch.float32, seed)
    tensors = [tensor.to(dtype) for tensor in tensors]
    values = dict(zip(every, all_of_them(tensors), strict=True))
    assert torch.equal(last(tensors)[0].nan_to_num(), values[count - 1].nan_to_num())
    some = random.Random(seed).sample(every, 4)
    for i, result in zip(some, compile_function(build(inputs, program, name, some), name="some")(tensors), strict=True):
        assert torch.equal(result.nan_to_num(), values[i].nan_to_num()), program[i - len(inputs)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_is_rounded_before_it_is_added(dtype):
    """Contraction to a fused multiply-add would depend on the product's other readers."""
    inputs = [((37, 45), dtype)] * 3

    def body(emit, a, b, c):
        product = emit(R.multiply(a, b))
        return [product, emit(R.add(product, c)), emit(R.subtract(c, emit(R.square(a))))]

    tensors = sample([(37, 45)] * 3, getattr(torch, dtype), 0)
    a, b, c = tensors
    expected = [a * b, a * b + c, c - a * a]
    for wanted in ([0, 1, 2], [1], [2], [0, 2]):
        ours = compile_function(function(inputs, lambda *args, w=wanted: [body(*args)[i] for i in w]), name="rounded")
        for index, result in zip(wanted, ours(tensors), strict=True):
            assert torch.equal(result, expected[index]), (wanted, index)
