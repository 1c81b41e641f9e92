"""Programs whose rows, sums and numbers follow the sizes: bound to a size, the bits of the program compiled for it."""

from __future__ import annotations

import pytest
import torch
from tvm.relax import op as R

from autodiff import library
from tests.bridge.compile.test_symbolic import Symbolic, normalized
from tests.sampling import sampled

SIZES = [2, 3, 16, 17, 63, 64, 100, 700]
FEW = [2, 17, 64, 700]


def scores(emit, x, mask, n):
    y = emit(R.nn.softmax(emit(R.add(x, emit(R.reshape(mask, (3, 1, n))))), -1))
    return [y, emit(R.sum(y, [1])), emit(R.nn.log_softmax(x, -1))]


def moments(emit, x, weight, bias, n):
    y = normalized(emit, x, weight, bias)
    return [y, emit(R.sum(y, [0, 1])), emit(R.mean(x, [0, 2])), emit(R.mean(emit(R.multiply(x, x)), [1]))]


def over_rows(emit, x, n):
    y = emit(R.exp(x))
    return [emit(R.mean(y, 0)), emit(R.max(y, [0, 1])), emit(R.mean(y, [0, 1])), y]


def one_number(emit, x, n):
    return [emit(R.mean(emit(R.multiply(x, x)))), emit(R.sum(x))]


def turned(emit, x, n):
    y = emit(R.permute_dims(x, [0, 2, 1]))
    return [emit(R.nn.softmax(y, -1)), emit(R.sum(y, [2])), emit(R.negative(y))]


def numbers(emit, x, n):
    size, both = (emit(library.number(each, "float32")) for each in (n, n * n + 1))
    third = emit(R.divide(emit(R.astype(size, "float64")), emit(library.number(n - 1, "float64"))))
    return [emit(R.multiply(x, size)), emit(R.power(both, size)), third, emit(R.add(x, both)), size]


CASES = {
    "scores": ([(3, "n", "n"), (3, "n")], scores),
    "moments": ([(2, 5, "n"), ("n",), ("n",)], moments),
    "over_rows": ([("n", 4, 48)], over_rows),
    "one_number": ([("n", 640)], one_number),
    "turned": ([(2, "n", 40)], turned),
    "numbers": ([("n", 3)], numbers),
}


@pytest.mark.parametrize("sizes", sampled([FEW, SIZES], [FEW]), ids=len)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_program_of_that_size(name, sizes):
    made = Symbolic(*CASES[name])
    for size in sizes:
        if name == "one_number":  # a long sum is cut where its length tells
            torch.testing.assert_close(*made.both(n=size))
        else:
            made.assert_same_bits(n=size)
    assert all(guard.startswith("2147483647 >= ") for guard in made.guards), made.guards


def test_two_extents():
    made = Symbolic([("m", "n"), ("n",)], lambda emit, x, w, m, n: rows(emit, x, w), samples=(("n", 48), ("m", 7)))
    for m, n in ((2, 3), (3, 2), (64, 17), (40, 300)):
        made.assert_same_bits(n=n, m=m)


def rows(emit, x, weight):
    y = emit(R.multiply(emit(R.nn.softmax(x, -1)), weight))
    return [y, emit(R.sum(y, 0)), emit(R.mean(y, -1))]
