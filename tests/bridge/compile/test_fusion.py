"""Fusion of the work around matrix products: the number of kernels follows from the graph's structure alone."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest
import torch
from torch import nn
from torch.nn import functional

from bridge import add_tvm_dispatch, lower
from bridge.compile import CallLibrary, Launch, Program, compile_function
from bridge.compile.schedule.fuse import _Fuser

ROWS, COLUMNS = 256, 64


class Call(nn.Module):
    """A function with the parameters it reads."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args):
        return self.function(self, *args)


def rms_norm(m, x):
    return m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def layer_norm_of_residual(m, x, residual):
    return functional.layer_norm(functional.dropout(x + m.bias, 0.1) + residual, (COLUMNS,), m.weight, m.shift)


def masked_softmax(m, scores, mask):
    return functional.dropout(torch.softmax(scores * 0.125 + mask, -1), 0.1)


def new_activation(m, x):
    x = x + m.bias
    return x * torch.tanh(functional.softplus(1.7 * x)) + 0.1 * torch.sigmoid(x).square()


def lstm_gates(m, gates, c):
    i, f, g, o = (gates + m.bias).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def ones(count: int = COLUMNS) -> torch.Tensor:
    return torch.ones(count)


# name: module, arguments, kernels of the forward, kernels of the backward
CASES = {
    "RMSNorm": lambda: (Call(rms_norm, weight=ones()), [draw(ROWS, COLUMNS)], 1, 1),
    "SwiGLU": lambda: (Call(lambda m, a, b: functional.silu(a) * b), [draw(ROWS, COLUMNS), draw(ROWS, COLUMNS)], 1, 1),
    "log-softmax": lambda: (Call(lambda m, x: functional.log_softmax(x, -1)), [draw(ROWS, COLUMNS)], 1, 1),
    "bias + dropout + residual + LayerNorm": lambda: (
        Call(layer_norm_of_residual, bias=ones(), weight=ones(), shift=ones()),
        [draw(ROWS, COLUMNS), draw(ROWS, COLUMNS)],
        1,
        1,
    ),
    "scale + mask + softmax + dropout": lambda: (
        Call(masked_softmax),
        [draw(2, 3, 32, 32), torch.zeros(2, 1, 1, 32)],
        1,
        1,
    ),
    "bias + GELU": lambda: (Call(lambda m, x: functional.gelu(x + m.bias), bias=ones()), [draw(ROWS, COLUMNS)], 1, 1),
    "bias + a new activation": lambda: (Call(new_activation, bias=ones()), [draw(ROWS, COLUMNS)], 1, 1),
    "LSTM gates": lambda: (
        Call(lstm_gates, bias=ones(4 * COLUMNS)),
        [draw(ROWS, 4 * COLUMNS), draw(ROWS, COLUMNS)],
        1,
        2,
    ),
}


def steps_of(program: Program) -> list[Launch | CallLibrary]:
    return [step for step in program.steps if isinstance(step, Launch | CallLibrary)]


@pytest.mark.parametrize("name", CASES)
def test_kernels(name):
    torch.manual_seed(0)
    module, args, forward, backward = CASES[name]()
    lowered = lower(module, tuple(args))
    programs = [compile_function(half, name=name) for half in (lowered.forward, lowered.backward)]
    counts = tuple(len(steps_of(program)) for program in programs)
    assert counts == (forward, backward), "\n".join(map(str, programs))
    assert all(isinstance(step, Launch) for program in programs for step in steps_of(program))


def test_a_library_call_is_not_between_the_parts_of_one_kernel(monkeypatch):
    """``put`` reads one part of a kernel whose other part reads ``s``: readers of ``put`` run after ``s``."""

    def function(m, x, index, z):
        a = index.double()
        b = x.put(index, a, accumulate=True).tanh()
        s = (-z).exp()
        return torch.where(index > 0, s[0], a), b * 2 + s

    def ordered(fuser):
        list(TopologicalSorter({group: group.sources for group in fuser.groups}).static_order())
        return in_order(fuser)

    in_order = _Fuser._ordered
    monkeypatch.setattr(_Fuser, "_ordered", ordered)
    sample = torch.randn(12, dtype=torch.float64), torch.randint(0, 12, (24,)), torch.randn(12, dtype=torch.float64)
    module = add_tvm_dispatch(Call(function), sample)
    for one, other in zip(module(*sample), function(None, *sample), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
