"""Sums over rows whose number, length or both are known at the launch, with the bits of the static kernels of each."""

from __future__ import annotations

import pytest

from autodiff.extents import Dim, ExtentScope
from bridge.compile.cpu.backend import ORDER
from bridge.compile.loop_ir.graph import Graph
from bridge.compile.schedule.order import chunk_rows
from bridge.compile.schedule.products import ColumnPlan
from tests.bridge.compile.planned_graphs import Builder, assert_static_bits, symbolic
from tests.sampling import sampled

LENGTHS = [2, 3, 15, 16, 17, 63, 64, 65, 100, 300]
SIZES = [{"n": n, "m": m} for n, m in zip(LENGTHS, (2, 40, 3, 70, 5, 33, 2, 64, 7, 31), strict=True)]
FEW = [*SIZES[1::3], SIZES[-1]]


def rows(n: Dim, m: Dim) -> Graph:
    """Rows of a length that is a number."""
    b = Builder()
    y = b.op("exp", b.param(n, m, 48))
    return b.graph(b.reduce("sum", y, 1, n * m, 48, 48), y)


def rows_and_columns(n: Dim, m: Dim) -> Graph:
    b = Builder()
    y = b.op("exp", b.param(m, n))
    return b.graph(b.reduce("sum", y, 1, m, n, n))


def batched(n: Dim, m: Dim) -> Graph:
    b = Builder()
    y = b.op("exp", b.param(m, n, 24))
    return b.graph(b.reduce("sum", y, m, n, 24, m, 24), b.reduce("max", y, m, n, 24, m, 24))


def batched_columns(n: Dim, m: Dim) -> Graph:
    b = Builder("float64")
    return b.graph(b.reduce("sum", b.param(m, 20, n), m, 20, n, m, n))


def few_rows(n: Dim, m: Dim) -> Graph:
    """So few rows that they are one chunk at every size."""
    b = Builder("bfloat16")
    return b.graph(b.reduce("sum", b.param(m, 3, n), m, 3, n, m, n))


def turned_columns(n: Dim, m: Dim) -> Graph:
    """Rows in two loops, neither with a step of one."""
    b = Builder()
    return b.graph(b.reduce("max", b.transposed(b.param(n, m, 3), 2, 1, 0), 1, 3, m * n, m, n))


def norm_backward(n: Dim, m: Dim) -> Graph:
    """Gradients of weight and bias beside that of the input: sums along rows and over rows."""
    b = Builder()
    x, g, weight = b.param(m, n, 32), b.param(m, n, 32), b.param(32)
    row = b.reduce("sum", b.op("multiply", b.op("multiply", x, g), weight), m * n, 32, 1, m, n)
    dx = b.op("subtract", b.op("multiply", g, weight), b.op("multiply", x, b.reshaped(row, m, n, 1)))
    sums = [b.reduce("sum", each, 1, m * n, 32, 32) for each in (b.op("multiply", g, x), g)]
    return b.graph(dx, *sums)


def norm_backward_of_rows(n: Dim, m: Dim) -> Graph:
    """Along rows of symbolic length."""
    b = Builder()
    x, g, weight = b.param(m, n), b.param(m, n), b.param(n)
    row = b.reduce("sum", b.op("multiply", b.op("multiply", x, g), weight), m, n, 1, m)
    dx = b.op("subtract", b.op("multiply", g, weight), b.op("multiply", x, b.reshaped(row, m, 1)))
    sums = [b.reduce("sum", each, 1, m, n, n) for each in (b.op("multiply", g, x), g)]
    return b.graph(dx, *sums)


GRAPHS = [
    rows,
    rows_and_columns,
    batched,
    batched_columns,
    few_rows,
    turned_columns,
    norm_backward,
    norm_backward_of_rows,
]


@pytest.mark.parametrize("sizes", sampled([FEW, SIZES], [FEW]), ids=len)
@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_every_size_has_the_bits_of_its_static_kernels(make, sizes):
    assert_static_bits(make, sizes, n=40, m=12)


@pytest.mark.parametrize("make", [rows, rows_and_columns, norm_backward], ids=lambda make: make.__name__)
def test_a_large_sample_makes_no_difference(make):
    assert_static_bits(make, SIZES[::3], n=512, m=200)


def test_one_chunk_whatever_the_sizes_are_needs_no_partial_results():
    assert isinstance(symbolic(few_rows, n=40, m=12).planned[0].plan, ColumnPlan)
    assert not isinstance(symbolic(rows_and_columns, n=40, m=12).planned[0].plan, ColumnPlan)


@pytest.mark.parametrize("rows_of", [lambda n: n * 3, lambda n: n, lambda n: n + 1], ids=["3 n", "n", "n + 1"])
@pytest.mark.parametrize("columns_of", [lambda m: m, lambda m: 8, lambda m: 16384], ids=["m", "8", "16384"])
def test_the_chunks_of_a_launch_are_those_of_its_numbers(rows_of, columns_of):
    scope = ExtentScope()
    n, m = scope.symbol("n", 40), scope.symbol("m", 12)
    chunks = ORDER.column_chunks(rows_of(n), columns_of(m))
    size = chunk_rows(rows_of(n), chunks)
    for each in SIZES:
        numbers = rows_of(each["n"]), columns_of(each["m"])
        expected = ORDER.column_chunks(*numbers)
        assert scope.value(chunks, each) == expected
        assert scope.value(size, each) == chunk_rows(numbers[0], expected)
    assert scope.guards == ()


def test_a_long_sum_has_two_stages_if_a_number_divides_it():
    scope = ExtentScope()
    n = scope.symbol("n", 40)
    assert ORDER.stages((n, 768), {0, 1}) == [(n, 768, 1), (1, n, 1)]
    assert ORDER.stages((n, 7), {0, 1}) == [(1, n * 7, 1)]
    assert ORDER.stages((n, 4, 768), {1, 2}) == [(n, 3072, 1)]
    assert ORDER.stages((n, 768), {0}) == [(1, n, 768)]
    assert scope.guards == ()
