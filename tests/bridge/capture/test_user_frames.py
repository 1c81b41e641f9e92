"""A node's stack trace has the user's lines, as torch's own has, and torch's is back afterwards."""

from __future__ import annotations

import torch
from torch import nn

from bridge.base.errors import user_line
from bridge.base.torch_internals import FullTraceback, fx_proxy
from bridge.capture import capturing


class Inner(nn.Module):
    def forward(self, x):
        return helper(x).sin()


def helper(x):
    return x * 2


def test_lines_are_those_that_torch_notes():
    module, x = nn.Sequential(Inner(), nn.LayerNorm(4)), torch.randn(3, 4)
    whole = torch.export.export(module, (x,), strict=False).graph
    with capturing(module):
        assert fx_proxy.CapturedTraceback is not FullTraceback
        short = torch.export.export(module, (x,), strict=False).graph
    assert fx_proxy.CapturedTraceback is FullTraceback
    lines = [[user_line(node.meta.get("stack_trace")) for node in graph.nodes] for graph in (whole, short)]
    assert lines[0] == lines[1]
    assert {line.rpartition(": ")[2] for line in lines[1] if line} == {"return helper(x).sin()"}
