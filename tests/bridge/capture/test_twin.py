"""Twins of modules: objects that own a resource, and attributes that a dispatch adds, are not copied."""

from __future__ import annotations

import gc
from typing import ClassVar

import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.capture.twin import Twin


class Handle:
    """Gives something back when it dies."""

    given_back: ClassVar[list[str]] = []

    def __init__(self, tensor):
        self.tensor = tensor

    def __del__(self):
        self.given_back.append("handle")


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.handle = Handle(self.scale)

    def forward(self, x):
        return self.linear(x) * self.handle.tensor


def test_copies_give_nothing_back():
    module, x = Holding(), torch.randn(2, 4)
    expected = module(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            add_tvm_dispatch(module, x)
            torch.testing.assert_close(module(x), expected)
    gc.collect()
    assert not Handle.given_back and stats(module).hits == 2


def test_of_a_dispatched_module_nothing_compiled_is_copied():
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    add_tvm_dispatch(module, x)
    twin = Twin(module, torch.clone)
    assert all(isinstance(made, nn.Module | torch.Tensor | dict | set) for made in twin._copier.copies.values())
    torch.testing.assert_close(twin.module(x), module(x))
