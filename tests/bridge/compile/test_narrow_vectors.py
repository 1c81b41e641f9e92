"""Remaining columns after the vectors: a narrower vector, with the bits of single elements."""

from __future__ import annotations

import itertools

import pytest
import torch
from tvm.relax import op as R

from bridge.base.session import SESSION
from bridge.compile import compile_function, host_backend
from bridge.compile.cpu import row
from bridge.compile.cpu.row import narrowed
from tests.bridge.compile_helpers import function
from tests.sampling import sampled

LANES = host_backend().order.lanes


def softmax(emit, x):
    return [emit(R.nn.softmax(x))]


def compared(emit, x):
    return [emit(R.greater(x, emit(R.mean(x, axis=[-1], keepdims=True))))]


LEFT = [1, LANES // 2 - 1, LANES // 2, LANES // 2 + 3, LANES - 1]
#: Both bodies with all that may be left, of one type; the other types with most of it; rows shorter than a vector.
ALWAYS = [
    *((3, left, body, "float32") for left in LEFT for body in (softmax, compared)),
    *((3, LEFT[-1], body, dtype) for dtype in ("float64", "float16") for body in (softmax, compared)),
    *((0, left, softmax, "float32") for left in LEFT),
    *((0, LEFT[-2], compared, dtype) for dtype in ("float64", "float16")),
]


@pytest.mark.parametrize(
    ("vectors", "left", "body", "dtype"),
    sampled(itertools.product([0, 3], LEFT, [softmax, compared], ["float32", "float64", "float16"]), ALWAYS),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bits(monkeypatch, vectors, left, body, dtype):
    found, narrow = [], []
    x = torch.randn(9, vectors * LANES + left).to(getattr(torch, dtype))

    def seen(*arguments):
        narrow.append(any(part.lanes > 1 for part in narrowed(*arguments)))
        return narrowed(*arguments)

    for walk in (seen, lambda _number, _extent, _lanes, tail: list(tail)):
        SESSION.reset("programs")
        monkeypatch.setattr(row, "narrowed", walk)
        found += compile_function(function([(tuple(x.shape), dtype)], body), name="test")([x])
    assert any(narrow) == (left >= 4)
    assert torch.equal(*found)
