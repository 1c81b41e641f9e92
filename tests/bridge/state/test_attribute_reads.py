"""Which attributes of an object a run reads: all that may have decided what it did, and no others."""

from __future__ import annotations

import copy
import operator
import pickle
from dataclasses import asdict, dataclass

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config

from bridge import add_tvm_dispatch, stats
from bridge.base.errors import DispatchMiss
from bridge.state import AttributeReads


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


class Mapped(Settings):
    def __getattribute__(self, name):
        return super().__getattribute__({"factor": "scale"}.get(name, name))


class Guessing(Settings):
    def __getattr__(self, name):
        return self.__dict__["scale"]


class Slots:
    __slots__ = ("__dict__", "scale")


def read_by(run, settings):
    before = vars(type(settings)).get("__getattribute__")
    reads = AttributeReads([settings])
    with reads.watched():
        run(settings)
    assert vars(type(settings)).get("__getattribute__") is before
    return reads.of(settings)


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda s: s.scale, {"scale"}),
        (lambda s: s.both, {"both", "scale", "shift"}),
        (lambda s: s.scaled(3), {"scaled", "scale"}),
        (lambda s: getattr(s, "absent", None), {"absent"}),
        (lambda s: hasattr(s, "shift"), {"shift"}),
        (operator.attrgetter("scale", "title"), {"scale", "title"}),
        (lambda s: isinstance(s, int), {"__class__"}),
        (lambda s: setattr(s, "title", "b"), set()),
        (vars, None),
        (copy.copy, None),
        (copy.deepcopy, None),
        (pickle.dumps, None),
    ],
)
def test_what_is_read(run, names):
    assert read_by(run, Settings()) == (None if names is None else frozenset(names))


def test_reads_of_every_field():
    assert {"scale", "shift", "title"} <= (read_by(asdict, Settings()) or {"scale", "shift", "title"})
    assert {"scale", "shift", "title"} <= read_by(lambda s: s == Settings(), Settings())


def test_values_that_lie_elsewhere_are_reads_of_everything():
    assert read_by(lambda s: s.factor, Mapped()) is None
    assert {"shift", "scale", "factor"} <= read_by(lambda s: s.shift, Mapped()), "what its own code names counts"
    assert read_by(lambda s: s.anything, Guessing()) is None
    assert read_by(lambda s: s.hidden_size, GPT2Config()) is None
    assert "hidden_size" in read_by(lambda s: s.hidden_size, BertConfig())


def test_a_class_that_cannot_be_watched_counts_as_read():
    error = ValueError("what is built in")
    reads = AttributeReads([error])
    with reads.watched():
        pass
    assert reads.of(error) is None and reads.of(Settings()) is None


class Layer(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), settings

    def forward(self, x):
        return self.settings.scaled(self.linear(x)) + getattr(self.settings, "more", 0)


def test_a_call_is_compiled_for_what_it_reads():
    """What it does not read may change, come and go; what it reads, or looked for in vain, may not."""
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
