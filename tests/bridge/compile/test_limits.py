"""Other numbers than a backend's own: limits change no bit, orders of reductions round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tvm.relax import op

from bridge.compile import CompileOptions, backend_for, compile_function
from tests.bridge.compile_helpers import assert_same, function
from tests.sampling import sampled

HOST = backend_for(None)
LIMITS = {
    "cheap_in_known_rows": (0, 16),
    "tasks": (16, 256),
    "column_vectors": (1, 8),
    "nodes": (16, 160),
    "buffers": (12, 96),
    "flat_row": (1024, 16_384),
    "short_row": (64, 1024),
    "parallel_work": (60_000, 1_000_000),
    "parallel_columns": (40_000, 600_000),
    "shared_elements": (512, 65_536),
    "serial_elements": (8192, 131_072),
    "terms": (8, 32),
    "joined_sections": (1, 16),
    "section_operators": (1, 12),
}
ORDERS = {
    "lanes": (32, 8),
    "interleaved": ((8, 4, 2, 1), (2, 1), (1,)),
    "most_chunks": (8, 16, 64),
    "chunk_elements": (4096, 65_536),
}


def compiled(func, **other):
    return compile_function(func, name="test", options=CompileOptions.current(replace(HOST, **other)))


def normalized(emit, x, scale):
    """A softmax, sums of rows and of columns, a concatenation."""
    scaled = emit(op.multiply(x, scale))
    soft = emit(op.nn.softmax(scaled, axis=1))
    joined = emit(op.concat([scaled, emit(op.exp(x))], axis=1))
    return [soft, emit(op.sum(emit(op.exp(scaled)), [1])), emit(op.sum(scaled, [0])), joined]


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    inputs = [torch.randn(220, 168), torch.randn(168)]
    func = function([((220, 168), "float32"), ((168,), "float32")], normalized)
    return func, inputs, compile_function(func, name="test")(inputs)


@pytest.mark.parametrize("place", [0, 1], ids=["small values", "large values"])
def test_limits_change_no_bit(case, place):
    func, inputs, wanted = case
    limits = HOST.limits.having(**{name: values[place] for name, values in LIMITS.items()})
    assert all(map(torch.equal, compiled(func, limits=limits)(inputs), wanted))


@pytest.mark.parametrize(
    ("name", "value"),
    sampled(
        [(name, value) for name, values in ORDERS.items() for value in values],
        [(name, values[0]) for name, values in ORDERS.items()],
    ),
)
def test_orders_only_round(case, name, value):
    func, inputs, wanted = case
    order = replace(HOST.order, **{name: value})
    for mine, its in zip(compiled(func, order=order)(inputs), wanted, strict=True):
        assert_same(mine, its, rtol=1e-5, atol=2e-5)


def test_code_is_built_once_for_all_limits(case):
    func, _, _ = case
    ours, theirs = compiled(func), compiled(func, limits=HOST.limits.having(terms=15))
    assert ours != theirs and {*map(id, ours.code.values())} == {*map(id, theirs.code.values())}


def test_numbers_that_there_are_not():
    with pytest.raises(TypeError, match="there is no limit colour"):
        HOST.limits.having(colour=3)
    with pytest.raises(ValueError, match="wanted powers of two"):
        replace(HOST.order, lanes=12)
