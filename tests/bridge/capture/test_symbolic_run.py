"""The second run on symbolic sizes: rows that are equal at the sample's sizes hold at all others."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.export import Dim

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Function
from tests.bridge.symbolic import assert_as_eager, differentiated

AUTO = Dim.AUTO


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Places(nn.Module):
    """Its table is exactly as long as the sample, so that the slice of it is the whole table there."""

    def __init__(self, length: int):
        super().__init__()
        self.register_buffer("table", normal(length, 6))
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x):
        y = self.linear(x) + self.table[: x.shape[1], :].tanh()
        return y + self.table[None, : x.shape[1]]


@pytest.mark.parametrize("length", [7, 12])
def test_a_part_that_is_the_whole_of_the_sample_is_a_part_for_other_sizes(length):
    lowered = differentiated(Places(length), normal(3, 7, 6), ({0: AUTO, 1: AUTO},))
    assert [symbol.name for symbol in lowered.captured.sizes.scope.samples] == ["x_0", "x_1"]
    assert_as_eager(lowered, lambda *s: normal(*s, 6), [(3, 7), (2, 5), (4, 2)])
    assert lowered.captured.sizes.scope.broken()({"x_0": 3, "x_1": length + 1}) is not None


class Writes(nn.Module):
    """Views of a symbolic size that no static size has, written through."""

    def forward(self, x):
        y = x * 2
        y[:, 1:3].mul_(3)
        y[:, None].add_(1)
        y.clamp_(x.min() * 4, x[:1] + 3)
        y[:] = y + x[:, : x.shape[1]]
        return y[:, 0], y[:]


def test_what_fails_with_symbolic_sizes_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("bridge.capture.functional.python_kernels", nullcontext)
    with pytest.raises(UnsupportedModule, match=r"clamp_.*\n?.*sizes that vary"):
        differentiated(Writes(), normal(3, 5), ({0: AUTO, 1: AUTO},))


def test_writes_through_whole_parts():
    lowered = differentiated(Writes(), normal(3, 5), ({0: AUTO, 1: AUTO},))
    assert_as_eager(lowered, normal, [(3, 5), (2, 4), (6, 9)])


@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool1d(3, 2, 1),
        nn.ConstantPad1d((1, 2), 0.5),
        nn.Upsample(scale_factor=2, mode="linear"),
        nn.Sequential(nn.Conv1d(4, 5, 3), nn.AvgPool1d(2), nn.Dropout(0.3)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_operators_whose_kernels_read_sizes_fix_none(module):
    lowered = differentiated(module.double(), normal(3, 4, 17), ({0: AUTO, 2: AUTO},))
    assert len(lowered.captured.sizes.scope.samples) == 2
    sizes = [(3, 17), (2, 9), (4, 11), (5, 20)]
    if torch.__version__ < "2.13" and isinstance(module, nn.MaxPool1d | nn.Sequential):
        sizes.pop()  # a pooling fixes whether the size is odd
    assert_as_eager(lowered, lambda n, m: normal(n, 4, m), sizes)


@pytest.mark.cpu("a GPU's recurrent layers draw in cuDNN, which is refused")
@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
def test_recurrent_layers_with_dropout_of_any_length(layer):
    module = layer(6, 4, 2, dropout=0.4, bidirectional=True).double()
    lowered = differentiated(module, normal(5, 3, 6), ({0: AUTO, 1: AUTO},))
    assert len(lowered.captured.sizes.scope.samples) == 2
    assert [draw.shape[2] for draw in lowered.captured.draws] == [8]
    assert_as_eager(lowered, lambda *s: normal(*s, 6), [(5, 3), (9, 2), (2, 7)])


class Reads(nn.Module):
    def forward(self, x):
        return x * len(x[:, 0].tolist())


def test_how_many_numbers_are_read_is_fixed_where_they_are():
    with pytest.raises(UnsupportedModule, match=r"the sample's 4 alone\n.*len\(x\[:, 0\]\.tolist\(\)\)"):
        differentiated(Reads(), normal(4, 3), ({0: Dim("rows")},))


def test_sizes_that_numbers_decide_are_refused_where_others_vary():
    class Masks(nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0] * 2

    with pytest.raises(UnsupportedModule, match="depends on the numbers in a tensor, and sizes vary"):
        differentiated(Masks(), normal(4, 3), ({0: AUTO},))


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.as_strided((15,), (2,)),
        lambda x: x.square().as_strided((15,), (2,)).zero_(),
        lambda x: x[1:].as_strided((3, 3), (4, 1), 20),
        lambda x: torch.as_strided_copy(x, (15,), (2,)),
        lambda x: torch.as_strided_scatter(x.square(), torch.ones(15), (15,), (2,)),
    ],
)
def test_strided_places_lie_in_memory_also_where_nobody_reads_them(strided):
    module = Function(lambda x: (x * 2, strided(x))[0])
    add_tvm_dispatch(module, torch.randn(6, 6), dynamic_shapes=(({0: AUTO},),))
    assert module(torch.randn(8, 6)).shape == (8, 6)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        module(torch.randn(3, 6))
    assert stats(module).hits == 1


def test_memory_given_to_an_operator_is_refused():
    module = Function(lambda x: torch.empty(0).set_(x.square().untyped_storage(), 0, (2,), (2,)))
    with pytest.raises(UnsupportedModule, match="set_"):
        add_tvm_dispatch(module, torch.randn(6, 6), dynamic_shapes=(({0: AUTO},),))
