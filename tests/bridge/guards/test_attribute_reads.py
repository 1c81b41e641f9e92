"""Attributes of objects that forward reads: an entry serves calls with equal values of them alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.base.errors import DispatchMiss


@dataclass
class Settings:
    scale: float = 2.0
    shift: float = 1.0
    title: str = "a"

    @property
    def both(self):
        return self.scale, self.shift

    def scaled(self, x):
        return x * self.scale


class Layer(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), settings

    def forward(self, x):
        return self.settings.scaled(self.linear(x)) + getattr(self.settings, "more", 0)


def test_a_call_is_compiled_for_what_it_reads():
    """Attributes that forward does not read may change, come and go; read or missing ones may not."""
    settings = Settings()
    layer, x = Layer(settings), torch.randn(2, 4)
    add_tvm_dispatch(layer, x, on_miss="error")
    settings.title, settings.note = "b", ["new"]
    del settings.shift
    layer(x)
    assert stats(layer).hits == 1
    for name, value in (("scale", 3.0), ("more", 1)):
        before = vars(settings).copy()
        setattr(settings, name, value)
        with pytest.raises(DispatchMiss, match="attribute 'settings' of the module changed"):
            layer(x)
        vars(settings).clear()
        vars(settings).update(before)
        layer(x)


def test_a_changed_attribute_is_computed_with():
    settings = Settings()
    layer, x = Layer(settings), torch.randn(2, 4)
    add_tvm_dispatch(layer, x, on_miss="compile")
    for scale in (2.0, -1.0, 2.0):
        settings.scale = scale
        torch.testing.assert_close(layer(x), layer.linear(x) * scale)
