"""Equal dynamic calls share one lowering; calls that would differ for some size do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import as_call, assert_same, run
from tests.bridge.lowering.test_reuse import _nothing_known, captures  # noqa: F401

SAMPLE = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
SHAPES = ({0: Dim("rows", min=2, max=40)},)


class Block(nn.Module):
    """A layer that is the same function for the sample's five rows, for each ``way`` and ``index``."""

    def __init__(self, way: str = "plain", index: int = 5):
        super().__init__()
        self.way, self.index = way, index
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.linear(x))
        match self.way:
            case "the size as a number":
                return hidden * (x.shape[0] if self.index == 5 else 5)
            case "a branch":
                return hidden * 2 if x.shape[0] <= self.index else hidden
            case "a question that changes nothing":
                below = x.shape[0] <= self.index
                return hidden * 2 if below or not below else hidden
            case "a slice":
                return hidden[: self.index].sum(0)
        return hidden


def dispatched(*layers: nn.Module) -> list[nn.Module]:
    """Dispatched copies."""
    return [add_tvm_dispatch(copy.deepcopy(layer), SAMPLE, dynamic_shapes=SHAPES) for layer in layers]


def assert_as_eager(ours: nn.Module, eager: nn.Module, rows: int) -> None:
    x = torch.randn(rows, 4, dtype=torch.float64)
    assert_same(run(ours, as_call(x)), run(eager, as_call(x)))


def test_equal_layers_are_captured_once(captures):  # noqa: F811
    layers = [Block(index=index) for index in range(4)]  # an attribute that forward does not look at
    ours = dispatched(*layers)
    assert len(captures) == 1
    lowered = {id(entry.lowered) for layer in ours for entry in stats(layer).entries}
    assert len(lowered) == 1
    for layer, eager in zip(ours, layers, strict=True):
        for rows in (5, 2, 13, 40):
            assert_as_eager(layer, eager, rows)
        assert (stats(layer).hits, dict(stats(layer).misses)) == (4, {})


@pytest.mark.parametrize("way", ["the size as a number", "a branch", "a question that changes nothing", "a slice"])
def test_layers_that_differ_for_other_sizes_are_captured_each(captures, way):  # noqa: F811
    layers = [Block(way, index) for index in (5, 7)]
    ours = dispatched(*layers)
    assert len(captures) == 2
    for layer, eager in zip(ours, layers, strict=True):
        for rows in (5, 6, 13, 3):
            assert_as_eager(layer, eager, rows)


class Strided(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(-1)[:: x.shape[0]]


def test_a_step_that_varies_is_refused():
    with pytest.raises(UnsupportedModule, match="the step of a slice"):
        add_tvm_dispatch(Strided(4, 4).double(), SAMPLE, dynamic_shapes=SHAPES)


def test_dimensions_and_ranges_tell_calls_apart(captures):  # noqa: F811
    layer = Block()
    for shapes in (None, SHAPES, ({0: Dim("rows", min=2, max=30)},), ({0: Dim("lines", min=2, max=40)},), SHAPES):
        add_tvm_dispatch(copy.deepcopy(layer), SAMPLE, dynamic_shapes=shapes)
    assert len(captures) == 4
