"""One program for all sizes: bound to a size, it has the bits of the program that is compiled for that size."""

from __future__ import annotations

import dataclasses
import gc
import random
import re
import weakref

import pytest
import torch
from tvm import relax
from tvm.relax import op as R

from autodiff.extents import ExtentScope, maximum
from autodiff.library import number
from bridge.compile import compile_function
from bridge.compile.runtime import program as program_module
from bridge.compile.runtime.layout import lying_below
from bridge.compile.runtime.storage import load, save
from tests.bridge.compile.symbolic import SAMPLE, Symbolic
from tests.bridge.compile_helpers import function

SIZES = [2, 17, SAMPLE, 700]


def normalized(emit, x, weight, bias, dtype="float32"):
    centred = emit(R.subtract(x, emit(R.mean(x, -1, keepdims=True))))
    variance = emit(R.mean(emit(R.multiply(centred, centred)), -1, keepdims=True))
    scaled = emit(R.multiply(centred, emit(R.rsqrt(emit(R.add(variance, relax.const(1e-5, dtype)))))))
    return emit(R.add(emit(R.multiply(scaled, weight)), bias))


def pointwise(emit, x, bias, n):
    return [emit(R.nn.gelu(emit(R.add(x, bias)))), emit(R.negative(x))]


def flat(emit, x, y, n):
    return [emit(R.exp(emit(R.multiply(x, y))))]


def rows(emit, x, weight, bias, n):
    y = normalized(emit, emit(R.nn.gelu(emit(R.add(x, bias)))), weight, bias)
    return [y, emit(R.nn.softmax(y, -1)), emit(R.max(x, -1))]


def columns(emit, x, weight, n):
    y = emit(R.multiply(x, weight))
    return [emit(R.sum(y, 0)), emit(R.max(y, 0)), emit(R.sum(emit(R.exp(y)), 0, keepdims=True)), y]


def heads(emit, x, bias, n):
    y = emit(R.reshape(emit(R.add(x, bias)), (n, 5, 4, 8)))
    turned = emit(R.permute_dims(y, [0, 2, 1, 3]))
    return [turned, emit(R.reshape(turned, (n * 20, 8))), emit(R.sum(turned, [0, 2]))]


def slices(emit, x, n):
    first, second = (emit(R.strided_slice(x, [1], [begin], [begin + 32])) for begin in (0, 32))
    turned = emit(R.concat([emit(R.negative(second)), first], 1))
    shifted = emit(R.strided_slice(x, [0], [1], [n]))
    return [emit(R.add(emit(R.exp(first)), second)), turned, emit(R.exp(shifted)), emit(R.sum(turned, 1))]


def joined(emit, x, y, n):
    parts = [emit(R.expand_dims(each, 0)) for each in (x, y)]
    return [emit(R.concat([x, emit(R.exp(y))], 0)), emit(R.concat(parts, 0))]


def padded(emit, x, n):
    one, many = emit(R.nn.pad(x, [0, 0, 1, 0, 0, 0])), emit(R.nn.pad(x, [2, 1, 0, 0, 3, 0], "constant", 0.5))
    return [one, many, emit(R.add(emit(R.nn.pad(emit(R.exp(x)), [0, 0, 0, 0, 0, 7])), relax.const(1.0)))]


def broadcasts(emit, x, y, n):
    wide = emit(R.broadcast_to(emit(R.reshape(y, (n, 1, 16))), (n, 3, 16)))
    return [emit(R.add(x, wide)), wide, emit(R.zeros((n, 3), "float32")), emit(R.sum(emit(R.multiply(x, wide)), 1))]


def positions(emit, x, n):
    at = emit(R.astype(emit(R.arange(0, n, 1, "int64")), "float32"))
    wide = emit(R.broadcast_to(emit(R.reshape(at, (n, 1))), (n, 40)))
    return [emit(R.add(x, wide)), at]


def sizes_as_numbers(emit, x, n):
    mean = emit(R.divide(emit(R.sum(x, 0)), emit(number(n, "float32"))))
    whole = emit(R.astype(emit(R.multiply(x, relax.const(100.0))), "int64"))
    return [
        mean,
        emit(number(n * n + 1, "float32")),
        emit(R.astype(emit(number(n, "int64")), "bfloat16")),
        emit(R.clip(whole, 0, n - 1)),
        emit(R.subtract(x, mean)),
        emit(R.multiply(x, emit(number(n * 40 - 1, "float32")))),
        emit(R.mean(x, 0)),
    ]


def perceptron(emit, x, weight, bias, back, n):
    h = emit(R.add(emit(R.matmul(x, emit(R.permute_dims(weight)))), bias))
    y = emit(R.matmul(emit(R.nn.gelu(h)), back))
    gradient = emit(R.matmul(emit(R.permute_dims(x)), emit(R.tanh(y))))
    return [y, emit(R.add(x, y)), gradient, emit(R.sum(y, 0))]


def attention(emit, x, n):
    y = emit(R.permute_dims(emit(R.reshape(x, (n, 6, 3, 2, 16))), [2, 0, 3, 1, 4]))
    q, k, v = (emit(R.reshape(emit(R.strided_slice(y, [0], [i], [i + 1])), (n, 2, 6, 16))) for i in range(3))
    scores = emit(R.nn.softmax(emit(R.matmul(q, emit(R.permute_dims(k, [0, 1, 3, 2])))), -1))
    heads = emit(R.permute_dims(emit(R.matmul(scores, v)), [0, 2, 1, 3]))
    return [emit(R.reshape(heads, (n * 6, 32))), scores]


def gathered(emit, x, table, n):
    at = emit(R.astype(emit(R.clip(emit(R.multiply(emit(R.abs(x)), relax.const(3.0))), 0, 9)), "int64"))
    rows = emit(R.gather_elements(table, emit(R.broadcast_to(emit(R.reshape(at, (n * 4, 1))), (n * 4, 24))), 0))
    return [emit(R.reshape(rows, (n, 4, 24))), emit(R.cumsum(emit(R.flip(x, 0)), 1)), emit(R.sum(emit(R.exp(rows)), 0))]


CASES = {
    "pointwise": ([("n", 64), (64,)], pointwise),
    "flat": ([("n", 33), ("n", 33)], flat),
    "rows": ([("n", 5, 64), (64,), (64,)], rows),
    "columns": ([("n", 80), (80,)], columns),
    "heads": ([("n", 5, 32), (32,)], heads),
    "slices": ([("n", 64)], slices),
    "joined": ([("n", 40), ("n", 40)], joined),
    "padded": ([("n", 3, 5)], padded),
    "broadcasts": ([("n", 3, 16), ("n", 16)], broadcasts),
    "positions": ([("n", 40)], positions),
    "sizes as numbers": ([("n", 40)], sizes_as_numbers),
    "perceptron": ([("n", 32), (48, 32), (48,), (48, 32)], perceptron),
    "attention": ([("n", 6, 96)], attention),
    "gathered": ([("n", 4), (10, 24)], gathered),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_program_of_that_size(name):
    made = Symbolic(*CASES[name])
    for size in SIZES:
        made.assert_same_bits(n=size)
    (guard,) = made.guards
    assert guard.startswith("2147483647 >= ")


@pytest.mark.parametrize("name", ["perceptron", "attention"])
def test_products_computed_as_was_measured_for_the_sample(name):
    shapes, body = CASES[name]
    made = Symbolic(shapes, body, "float64", deterministic=False)
    for size in SIZES:
        for our, their in zip(*made.both(n=size), strict=True):
            torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)


def test_an_extent_that_is_zero_in_the_sample():
    def body(emit, x, n):
        more = maximum(n - SAMPLE, 0)
        return [emit(R.full((more,), relax.const(1.5))), emit(R.zeros((more, 3), "float32")), emit(R.exp(x))]

    made = Symbolic([("n", 4)], body)
    for size in SIZES:
        made.assert_same_bits(n=size)


def test_two_symbols():
    def body(emit, x, y, b, s):
        wide = emit(R.add(emit(R.reshape(x, (b * s, 40))), relax.const(1.0)))
        product = emit(R.multiply(emit(R.reshape(wide, (b, s, 40))), emit(R.reshape(y, (b, 1, 40)))))
        return [product, emit(R.sum(product, [0, 1])), emit(R.nn.softmax(product, -1)), emit(R.sum(wide, 0))]

    made = Symbolic([("b", "s", 40), ("b", 40)], body, samples=(("b", 4), ("s", 24)))
    for b, s in [(2, 2), (4, 24), (24, 4), (3, 7), (16, 100)]:
        made.assert_same_bits(b=b, s=s)
    assert made.guards == ["2147483647 >= 40*b*s"]


@pytest.fixture(scope="module")
def layer() -> Symbolic:
    return Symbolic(*CASES["rows"])


def test_nothing_is_built_for_a_size(layer, monkeypatch):
    monkeypatch.setattr(type(layer.program.backend), "build", None)
    for size in range(2, 40):
        bound = layer.program.at({"n": size})
        assert bound.kernels is layer.program.kernels and bound.scope is None
        assert bound is layer.program.at({"n": size}) and layer.program.bind({"n": size}) is bound.executor
        assert [param.shape for param in bound.layout.params] == [(size, 5, 64), (64,), (64,)]


def test_a_program_of_one_size_is_bound_to_no_other():
    program = Symbolic(*CASES["flat"]).static({"n": 3})
    assert program.at({}) is program and program.bind({}) is program.executor


def test_sizes_that_a_program_is_not_made_for(layer):
    bind = layer.program.bind
    for size, broken in [(1, "n >= 2"), (2**23, "2147483647 >= 320*n")]:
        with pytest.raises(
            ValueError, match=re.escape(f"symbolic is compiled for sizes with {broken}, got {{'n': {size}")
        ):
            bind({"n": size})
    with pytest.raises(ValueError, match=r"wanted sizes of n, got \{'m': 3\}"):
        bind({"m": 3})
    with pytest.raises(ValueError, match="compiled for any n: bind it to sizes first"):
        layer.program(layer.inputs({"n": 4}))
    with pytest.raises(ValueError, match=r"has shape \(4, 5, 64\)"):
        bind({"n": 5})(layer.inputs({"n": 4}))


def test_bound_sizes_are_few(layer):
    first = weakref.ref(layer.program.at({"n": 2}))
    for size in range(100, 150 + program_module._MOST_BOUND):
        layer.program.at({"n": size})
    gc.collect()
    assert first() is None and len(layer.program._bound) <= program_module._MOST_BOUND


def test_functions_of_equal_symbols_share_a_program():
    def reversed_rows(emit, x, y, n, m):
        return [emit(R.exp(x)), emit(R.negative(y))]

    scope = ExtentScope()
    n, m = scope.symbol("n", 6), scope.symbol("m", 6)
    one, again, swapped = (
        function([((a, 4), "float32"), ((b, 4), "float32")], lambda emit, x, y: reversed_rows(emit, x, y, n, m))
        for a, b in [(n, m), (n, m), (m, n)]
    )
    program = compile_function(one, name="one")
    assert compile_function(again, name="again") is program
    other = compile_function(swapped, name="swapped")
    inputs = [torch.zeros(3, 4), torch.zeros(5, 4)]
    assert [each.shape[0] for each in program.bind({"n": 3, "m": 5})(inputs)] == [3, 5]
    assert [each.shape[0] for each in other.bind({"n": 5, "m": 3})(inputs)] == [3, 5]
    assert Symbolic(*CASES["flat"]).program is not Symbolic(*CASES["flat"]).program  # each has a scope of its own


@pytest.mark.parametrize("name", ["positions", "attention", "perceptron"])
def test_saved_and_loaded(name, tmp_path):
    made = Symbolic(*CASES[name])
    save(made.program, tmp_path / "program")
    loaded = load(tmp_path / "program", made.program.backend)
    assert loaded == made.program and str(loaded).splitlines()[1:] == str(made.program).splitlines()[1:]
    assert loaded.scope.guards == made.scope.guards and loaded.scope.ranges == made.scope.ranges
    for size in SIZES:
        inputs = made.inputs({"n": size})
        ours, theirs = loaded.bind({"n": size})(inputs), made.program.bind({"n": size})(inputs)
        assert all(map(torch.equal, ours, theirs))
    with pytest.raises(ValueError, match="compiled for sizes with n >= 2"):
        loaded.bind({"n": 1})
    assert dataclasses.replace(loaded, steps=loaded.steps[1:]) != made.program and made.guards == list(
        map(str, loaded.scope.guards)
    )


def test_values_alive_together_never_overlap_whatever_the_sizes():
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 24)
        lifetimes = [sorted((rng.randrange(16), rng.randrange(16))) for _ in range(count)]
        below = lying_below([tuple(each) for each in lifetimes])
        ends: list[int] = []
        for size, under in zip([rng.randint(0, 9) for _ in lifetimes], below, strict=True):
            ends.append(max([ends[index] for index in under], default=0) + size)
            begin = ends[-1] - size
            first, last = lifetimes[len(ends) - 1]
            for (start, stop), end in zip(lifetimes, ends[:-1], strict=False):
                assert stop < first or last < start or end <= begin
