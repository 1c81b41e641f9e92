"""Dynamic entries: a call's results and counters beside tensors follow the size, or the size does not vary."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.base.torch_internals import pytree
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="sizes of operators of older versions are fixed")


@dataclasses.dataclass
class Output:
    y: Any
    more: Any


class Told:
    """A pytree node whose structure depends on a number."""

    def __init__(self, y, rows):
        self.y, self.rows = y, rows


pytree.register_pytree_node(Told, lambda told: ([told.y], told.rows), lambda children, rows: Told(*children, rows))


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.calls = self.rows = 0

    def forward(self, x, *args, **kwargs):
        return self.function(self, x, *args, **kwargs)


def described(value: Any) -> Any:
    """Types and numbers all the way down; of a tensor the shape."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple | list | dict):
        return type(value), [described(part) for part in (value.values() if isinstance(value, dict) else value)]
    return (type(value), described(vars(value))) if hasattr(value, "__dict__") else (type(value), value)


def counts_rows(self, x):
    self.rows += x.shape[0]
    return x * 2


def counts_calls(self, x):
    self.calls += 1
    return x * 2


def counts_by_branch(self, x):
    self.calls += 1 if x.shape[0] > 5 else 3
    return x * 2


FOLLOWS = {
    "a size": lambda self, x: (x * 2, x.shape[0]),
    "computed": lambda self, x: {"y": x * 2, "n": x.shape[0] * 3 + 1, "z": x + 1},
    "torch.Size": lambda self, x: (x * 2, x.shape, x.flatten().size()),
    "in an object": lambda self, x: Output(x * 2, Output(x + 1, [x.shape, "text"])),
    "a distribution": lambda self, x: torch.distributions.Normal(x, x.exp(), validate_args=False),
    "calls": counts_calls,
    "by branch": counts_by_branch,
}
FIXED = {
    "an attribute": lambda self, x: Output(x * 2, x.shape[0]),
    "a float": lambda self, x: (x * 2, x.shape[0] * 2.5),
    "a bool": lambda self, x: (x * 2, x.shape[0] > 4),
    "text": lambda self, x: (x * 2, str(x.shape[0])),
    "structure": lambda self, x: Told(x * 2, x.shape[0]),
    "rows": counts_rows,
}


@pytest.mark.parametrize(
    ("function", "varies"),
    sampled(
        [pytest.param(f, True, id=name) for name, f in FOLLOWS.items()]
        + [pytest.param(f, False, id=name) for name, f in FIXED.items()],
        lambda case: case[0] not in [{**FOLLOWS, **FIXED}[name] for name in ("computed", "a float", "text")],
    ),
)
def test_what_is_made_of_a_size(function, varies):
    module, eager = add_tvm_dispatch(Returns(function)), Returns(function)
    for rows in (3, 4, 5, 4, 7):
        x = torch.ones(rows, 2)
        assert described(module(x)) == described(eager(x))
        assert (module.calls, module.rows) == (eager.calls, eager.rows)
    assert any(entry.bound is not None for entry in stats(module).entries) == varies
    assert stats(module).hits == 5


def test_keywords_that_forward_does_not_name():
    module = add_tvm_dispatch(Returns(lambda self, x, *more, mask, **others: x * mask + others["bias"] + more[0]))
    eager = Returns(module.function)
    for rows in (3, 4, 5, 7):
        x, more = torch.rand(rows, 2), torch.rand(rows, 1)
        for names in (("mask", "bias"), ("bias", "mask")):
            given = {name: torch.full((rows, 2), float(len(name))) for name in names}
            torch.testing.assert_close(module(x, more, **given), eager(x, more, **given), rtol=0, atol=0)
    entries = stats(module).entries  # each order is an entry of its own: code behind ``**kwargs`` may read it
    assert stats(module).hits == 8 and any(entry.bound is not None for entry in entries)
