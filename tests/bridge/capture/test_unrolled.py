"""Unrolled loops of very many operators are refused by name; a deep network with as many is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.capture.loops import prove


class Steps(nn.Module):
    """Steps of one weight, each of a size of its own; or layers with weights of their own."""

    def __init__(self, count, are_layers):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in range(count if are_layers else 1))
        self.count, self.are_layers = count, are_layers

    def forward(self, x):
        for step in range(self.count):
            x = torch.cat([x, x[:1]]) * self.weights[step if self.are_layers else 0]
        return x


@pytest.mark.parametrize("count", [8, 7])
@pytest.mark.parametrize("are_layers", [True, False])
def test_a_loop_of_too_many_operators_is_refused(count, are_layers, monkeypatch):
    for limit in ("_STEPS", "_MANY", "MOST_OPERATORS"):
        monkeypatch.setattr(prove, limit, 8)
    module = Steps(count, are_layers)
    if are_layers or count < 8:
        add_tvm_dispatch(module, torch.randn(2))
        assert stats(module).entries
        return
    with pytest.raises(UnsupportedModule, match="24 operators of steps"):
        add_tvm_dispatch(module, torch.randn(2))
    assert torch.equal(module(torch.ones(2)), Steps.forward(module, torch.ones(2)))


def test_a_loop_of_many_operators_is_told(monkeypatch, caplog):
    monkeypatch.setattr(prove, "_MANY", 32)
    add_tvm_dispatch(Steps(prove._STEPS, False), torch.randn(2))
    assert "Steps.forward: a loop of" in caplog.text and "compiled step by step" in caplog.text
