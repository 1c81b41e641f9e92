"""Windows, mirrored pads and known positions: eager's numbers, and gradients that add up slices, not at positions."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from bridge import add_tvm_dispatch, lower, stats
from tests.bridge.compare import Function, check_module
from tests.bridge.symbolic import assert_as_eager, imported
from tests.sampling import sampled


def images(channels=6, height=7, width=8):
    return torch.randn(2, channels, height, width)


def columns(*extents):
    return lambda: torch.randn(2, *extents)


CASES = {
    "windows": (lambda x: F.unfold(x, 3), images),
    "windows in a row": (lambda x: F.unfold(x, (5, 1), padding=(2, 0)), lambda: images(width=1)),
    "dilated windows": (lambda x: F.unfold(x, (3, 2), dilation=(2, 3), padding=(2, 1)), images),
    "windows with gaps": (lambda x: F.unfold(x, (1, 2), stride=(2, 3)), images),
    "windows side by side": (lambda x: F.unfold(x, (3, 2), stride=(3, 2), padding=(1, 0)), images),
    "windows that overlap in part": (lambda x: F.unfold(x, (5, 3), stride=(2, 2), padding=1), images),
    "dilated windows with strides": (lambda x: F.unfold(x, 2, dilation=2, stride=3, padding=2), images),
    "one window": (lambda x: F.unfold(x, (7, 8)), images),
    "windows without a batch": (lambda x: F.unfold(x[0], 2, padding=1), images),
    "windows of complex numbers": (lambda x: F.unfold(torch.complex(x, x.sin()), 2).abs(), images),
    "folded": (lambda x: F.fold(x, (7, 8), 3), columns(18, 30)),
    "folded in a row": (lambda x: F.fold(x, (7, 1), (5, 1), padding=(2, 0)), columns(10, 7)),
    "folded, dilated": (lambda x: F.fold(x, (7, 8), (3, 2), dilation=(2, 3), padding=(2, 1)), columns(12, 49)),
    "folded with gaps": (lambda x: F.fold(x, (7, 8), (1, 2), stride=(2, 3)), columns(4, 12)),
    "folded side by side": (lambda x: F.fold(x, (7, 8), (3, 2), stride=(3, 2), padding=(1, 0)), columns(12, 12)),
    "folded, overlapping in part": (lambda x: F.fold(x, (7, 8), (5, 3), stride=2, padding=1), columns(30, 12)),
    "folded without a batch": (lambda x: F.fold(x[0], (3, 3), 2), columns(8, 4)),
    "folded again": (lambda x: F.fold(F.unfold(x, 3, padding=1), (7, 8), 3, padding=1), images),
    "sliding": (lambda x: x.unfold(2, 3, 1), images),
    "sliding over the last axis": (lambda x: x.unfold(-1, 5, 2), images),
    "sliding with gaps": (lambda x: x.unfold(1, 2, 3), images),
    "sliding side by side": (lambda x: x.unfold(2, 2, 2).unfold(3, 4, 4), images),
    "sliding, nothing": (lambda x: x.unfold(2, 0, 1), images),
    "sliding over complex numbers": (lambda x: torch.complex(x, x.sin()).unfold(3, 3, 2).abs(), images),
    "reflected": (lambda x: F.pad(x, (2, 1), mode="reflect"), lambda: images()[0]),
    "reflected planes": (lambda x: F.pad(x, (7, 0, 1, 6), mode="reflect"), images),
    "reflected volumes": (lambda x: F.pad(x, (1, 2, 3, 1, 0, 2), mode="reflect"), lambda: images()[None]),
    "reflected and cut": (lambda x: F.pad(x, (-2, 3, 2, -1), mode="reflect"), images),
    "replicated": (lambda x: F.pad(x, (2, 11), mode="replicate"), lambda: images()[0]),
    "replicated planes": (lambda x: F.pad(x, (9, 0, 1, 8), mode="replicate"), images),
    "replicated volumes": (lambda x: F.pad(x, (1, 2, 3, 1, 0, 2), mode="replicate"), lambda: images()[None]),
    "replicated and cut": (lambda x: F.pad(x, (-2, 3, 2, -1), mode="replicate"), images),
    "around": (lambda x: F.pad(x, (2, 1, 0, 3), mode="circular"), images),
    "mirrored complex numbers": (
        lambda x: F.pad(F.pad(torch.complex(x, x.sin()), (1, 1), mode="replicate"), (2, 2), mode="reflect").abs(),
        lambda: images()[0],
    ),
}


POSITIONS = re.compile(r"library\.index(?!_select)|R\.(scatter|gather|index|take)")
"""Operators that write or add at positions that a tensor holds, and operators that read at unknown ones."""


KNOWN = {
    "a list": (lambda x: x[:, [0, 2, 1, -2, 2, 0]], images),
    "a range": (lambda x: x[:, torch.arange(0, 6, 2)], images),
    "a range of one": (lambda x: x[torch.arange(2)], images),
    "a computed range": (lambda x: x.index_select(1, (torch.arange(4) * 7 + 2) % 6), images),
    "a permutation": (lambda x: x[..., [3, 1, 0, 2, 7, 6, 5, 4]], images),
    "a table": (lambda x: x[:, :, [[0, 1, 2], [2, 3, 4], [4, 5, 6]]], images),
    "two tables": (lambda x: x[:, torch.arange(6)[:, None], torch.arange(7)[None]], images),
    "a triangle": (lambda x: x[(slice(None), slice(None), *torch.tril_indices(7, 7))], images),
    "repeats": (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 3, 1, 1]), dim=1), images),
    "equal repeats": (lambda x: x.repeat_interleave(3, dim=2), images),
}
CASES |= KNOWN
FEW = {
    "axes that are apart": (lambda x: x[:, [0, 1, 1], :, [2, 0, 2]], images),
    "positions in complex numbers": (lambda x: torch.complex(x, x.sin())[:, [0, 3, 3, 1, 2, 5]].abs(), images),
    "few of many": (lambda x: x[..., [7]], images),
    "one very often": (lambda x: x[..., [1, 1, 1, 1, 1, 1, 1, 2]], images),
    "other integers": (lambda x: x[:, torch.tensor([0, 2, 2], dtype=torch.int32)], images),
}
"""Positions that are also known, for additions."""


def function(name):
    return Function(lambda x: (CASES | FEW)[name][0](x * 2).square())


def sample(name):
    return lambda: (CASES | FEW)[name][1]().requires_grad_()


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(CASES | FEW, (torch.float64, torch.bfloat16)),
        lambda case: case[1] == torch.float64 or case[0] in ("windows", "folded", "reflected planes"),
    ),
    ids=str,
)
def test_results_and_gradients_are_eagers(name, dtype):
    if dtype == torch.bfloat16 and "complex" in name:
        pytest.skip("there are no complex numbers of this type")
    check_module(lambda: function(name), sample(name), dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_added_at_positions(name):
    lowered = lower(function(name), sample(name)())
    for of in (lowered.forward, lowered.backward):
        assert not POSITIONS.search(str(of))


def test_positions_that_a_buffer_holds_are_read_at_each_call():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.tensor([0, 2, 2]))

        def forward(self, x):
            return x[:, self.places].square()

    module, x = Module(), images().requires_grad_()
    add_tvm_dispatch(module, x)
    module.places.copy_(torch.tensor([5, 1, 5]))
    y = module(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x[:, [5, 1, 5]].square())
    torch.testing.assert_close(gradient, torch.autograd.grad(x[:, [5, 1, 5]].square().sum(), x)[0])
    assert stats(module).hits == 1


def test_integers_are_moved_about():
    def forward(x, i):
        mirrored = F.pad(F.pad(i, (2, 1, 1, 1), mode="replicate").double(), (1, 2), mode="reflect")
        return x * 2, i.unfold(1, 2, 3), i.unfold(2, 4, 3), mirrored

    check_module(lambda: Function(forward), lambda: (torch.randn(3).requires_grad_(), torch.arange(84).view(2, 6, 7)))


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


N, M = Dim("n"), Dim("m")
VARYING = {
    "windows": (lambda x: F.unfold(x, 3, padding=1), lambda n, m: torch.randn(n, 3, m, 5)),
    "dilated windows": (lambda x: F.unfold(x, (2, 3), dilation=2, padding=1), lambda n, m: torch.randn(n, 3, m, 5)),
    "windows with strides": (lambda x: F.unfold(x, 3, stride=2, padding=1), lambda n, m: torch.randn(n, 3, m, 5)),
    "folded": (lambda x: F.fold(x, (x.shape[2] + 1, 2), 2), lambda n, m: torch.randn(n, 12, m)),
    "folded with strides": (
        lambda x: F.fold(x, (2 * x.shape[2] + 1, 3), 3, stride=2),
        lambda n, m: torch.randn(n, 18, m),
    ),
    "sliding": (lambda x: x.unfold(2, 3, 1) * 2, lambda n, m: torch.randn(n, 3, m)),
    "sliding in part": (lambda x: x.unfold(2, 3, 2) * 2, lambda n, m: torch.randn(n, 3, m)),
    "reflected": (lambda x: F.pad(x, (2, 1), mode="reflect"), lambda n, m: torch.randn(n, 3, m)),
    "replicated": (lambda x: F.pad(x, (2, 1, 1, 0), mode="replicate"), lambda n, m: torch.randn(n, 3, m, 5)),
    "replicated to a length": (
        lambda x: F.pad(x, (0, 12 - x.shape[2]), mode="replicate"),
        lambda n, m: torch.randn(n, 3, m),
    ),
}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions fix the sizes, or guard them further")
@pytest.mark.parametrize("name", VARYING)
def test_sizes_may_vary(name):
    forward, made = VARYING[name]
    lowered = imported(Of(forward), made(4, 6).double(), ({0: N, 2: M},))
    assert not POSITIONS.search(str(lowered["imported"].function))
    assert_as_eager(lowered, lambda n, m: made(n, m).double(), [(3, 5), (2, 9), (5, 7)])
