"""Results of library functions lie in memory of their own: an executor reuses an input's memory once it is read."""

from __future__ import annotations

import pytest
import torch

from bridge.library import FUNCTIONS, invoke
from bridge.library.registry import TensorAt
from tests.device import DEVICE


def overlap(a, b):
    begins = a.data_ptr(), b.data_ptr()
    return begins[0] < begins[1] + b.nbytes and begins[1] < begins[0] + a.nbytes


VIEWS = {
    "itself": lambda x: x,
    "an alias": lambda x: x.view_as(x),
    "flat": lambda x: x.view(-1),
    "a row": lambda x: x[1],
    "transposed": lambda x: x.t(),
    "other numbers": lambda x: x.view(torch.int32),
    "twice": lambda x: (x * 2,) * 2,
    "parts of one": lambda x: (x * 2).split(1),
    "parts that overlap": lambda x: (lambda y: (y[:2], y[1:], y.view(-1)))(x * 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_results_share_no_memory(name):
    x = torch.randn(3, 4, device=DEVICE)
    expected = VIEWS[name](x)
    expected = [each.clone() for each in (expected if isinstance(expected, tuple) else (expected,))]
    made = invoke(VIEWS[name], [TensorAt(0)], [x])
    assert all(each.is_contiguous() and not overlap(each, x) for each in made)
    assert not any(overlap(a, b) for place, a in enumerate(made) for b in made[:place])
    assert all(map(torch.equal, made, expected))


def test_a_derivative_that_is_the_gradient():
    """A complex operator whose gradient comes back as another view of its argument."""
    numbers = [torch.randn(5, 2, device=DEVICE) for _ in range(4)]
    operands = '[[{"$complex": 0}, {"$complex": 1}, {"$complex": 2}], {}, []]'
    arguments = ["aten.addcmul.default", operands, 0, [0], *map(TensorAt, range(4))]
    (made,) = invoke(FUNCTIONS["operator_vjp"], arguments, numbers)
    assert torch.equal(made, numbers[3]) and not overlap(made, numbers[3])
