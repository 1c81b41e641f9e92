"""Forward's reads besides its arguments and tensors, in any place: if one changes after adding, the call runs eager.

One module reads it all; each case changes one thing, which the quick guard must see and the thorough one must name.
"""

import collections
import functools
import os
import types
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from bridge.base.errors import MODULE, GuardFailure
from bridge.state import SampleCall
from tests.bridge import settings
from tests.bridge.settings import shifted

pytestmark = pytest.mark.composes(
    "attributes, globals, closures, code that forward reads",
    "constants of the entry; a change is seen",
    section="Guards",
)

DROP = nn.Dropout(0.0)


class Box(dict):
    """Fields by attribute, kept as items: a common holder of options in training scripts."""

    __getattr__ = dict.__getitem__


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Act:
    """A callable with a setting, and one in its class."""

    bias = 0.25

    def __init__(self):
        self.slope = 2.0

    def __call__(self, x):
        return x * self.slope + self.bias


def _plus(x, amount=1.0, *, times=1.0):
    return (x + amount) * times


def _multiplier(factor):
    def multiply(x):
        return x * factor

    return multiply


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.config = types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace(scale=2.0)))
        self.box = Box(gain=1.0, inner=Box(gain=1.0))
        self.ordered = collections.OrderedDict(x=1.0)
        self.default = collections.defaultdict(float, x=1.0)
        self.recent = collections.deque([1.0, 2.0])
        self.slotted = Slotted(1.0)
        self.array = np.ones(3)
        self.act = Act()
        self.multiply = _multiplier(3.0)
        self.partial = functools.partial(_multiplier(2.0))
        self.hidden = [nn.Dropout(0.0)]

    def forward(self, x):
        x = torch.tanh(x * self.weight) * self.config.a.b.scale * self.box.gain * self.box.inner.gain
        x = x * self.ordered["x"] * self.default["x"] * self.recent[0] * self.slotted.value * float(self.array[1])
        x = shifted(x) * settings.SCALE + settings.TABLE["gain"] + settings.Hyper.shift + settings.fields.power
        x = F.relu(self.partial(self.multiply(self.act(_plus(x)))))
        return DROP(self.hidden[0](x)) * float(os.environ.get("TVM_DISPATCH_TEST_GAIN", "1"))


@contextmanager
def attribute(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def item(owner, key, value):
    before = owner[key]
    owner[key] = value
    try:
        yield
    finally:
        owner[key] = before


@contextmanager
def own_field(owner, name, value):
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def environment(value):
    os.environ["TVM_DISPATCH_TEST_GAIN"] = value
    try:
        yield
    finally:
        del os.environ["TVM_DISPATCH_TEST_GAIN"]


def _cell(function, name):
    return function.__closure__[function.__code__.co_freevars.index(name)]


CHANGES = {
    "object in an object": (lambda m: attribute(m.config.a.b, "scale", 3.0), "attribute 'config' of the module"),
    "dict subclass": (lambda m: item(m.box, "gain", 2.0), "attribute 'box' of the module"),
    "nested dict subclass": (lambda m: item(m.box["inner"], "gain", 2.0), "attribute 'box' of the module"),
    "OrderedDict": (lambda m: item(m.ordered, "x", 2.0), "attribute 'ordered' of the module"),
    "defaultdict": (lambda m: item(m.default, "x", 2.0), "attribute 'default' of the module"),
    "deque": (lambda m: item(m.recent, 0, 2.0), "attribute 'recent' of the module"),
    "slots": (lambda m: attribute(m.slotted, "value", 2.0), "attribute 'slotted' of the module"),
    "numpy array": (lambda m: item(m.array, 1, 2.0), "attribute 'array' of the module"),
    "callable object": (lambda m: attribute(m.act, "slope", 5.0), "attribute 'act' of the module"),
    "class of an object": (lambda m: attribute(Act, "bias", 1.0), "attribute 'bias' of class Act"),
    "closure of a function": (
        lambda m: attribute(_cell(m.multiply, "factor"), "cell_contents", 4.0),
        "variable 'factor' around _multiplier.<locals>.multiply",
    ),
    "closure within partial": (
        lambda m: attribute(_cell(m.partial.func, "factor"), "cell_contents", 4.0),
        "variable 'factor' around _multiplier.<locals>.multiply",
    ),
    "module in a list": (lambda m: attribute(m.hidden[0], "p", 0.5), "attribute 'hidden' of the module"),
    "mode of a module in a list": (lambda m: attribute(m.hidden[0], "training", False), "attribute 'hidden' of"),
    "global module": (lambda m: attribute(DROP, "p", 0.5), "global 'DROP.p' changed"),
    "setting of another file": (lambda m: attribute(settings, "SCALE", 3.0), "global 'tests.bridge.settings.SCALE'"),
    "table of another file": (
        lambda m: item(settings.TABLE, "gain", 3.0),
        "global 'tests.bridge.settings.TABLE['gain']'",
    ),
    "class of another file": (
        lambda m: attribute(settings.Hyper, "shift", 3.0),
        "attribute 'shift' of class Hyper changed",
    ),
    "object of another file": (lambda m: own_field(settings.fields, "power", 3.0), "global 'tests.bridge.settings.f"),
    "class of that object": (lambda m: attribute(settings.Fields, "power", 3.0), "attribute 'power' of class Fields"),
    "helper of a helper": (lambda m: attribute(settings, "scaled", lambda x: x), "global 'scaled' changed"),
    "function of torch": (lambda m: attribute(F, "relu", torch.tanh), "global 'torch.nn.functional.relu' changed"),
    "default argument": (lambda m: attribute(_plus, "__defaults__", (2.0,)), "default arguments of _plus changed"),
    "keyword default": (lambda m: attribute(_plus, "__kwdefaults__", {"times": 2.0}), "default arguments of _plus"),
    "code of a helper": (lambda m: attribute(_plus, "__code__", (lambda x: x).__code__), "code of _plus changed"),
    "code of forward": (
        lambda m: attribute(Reads.forward, "__code__", (lambda self, x: x).__code__),
        "code of Reads.forward changed",
    ),
    "environment": (lambda m: environment("2"), "an environment variable changed"),
}


@pytest.fixture(scope="module")
def module():
    module = Reads()
    add_tvm_dispatch(module, torch.ones(4, 6))
    return module


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_is_seen_and_named(module, name):
    change, reason = CHANGES[name]
    guard = stats(module).entries[0].guard
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    assert guard.check(module, (x,), {}) is not None
    with change(module):
        assert guard.check(module, (x,), {}) is None
        with pytest.raises(GuardFailure) as caught:
            guard.match(SampleCall(module, (x,), {}))
        assert caught.value.reason.startswith(reason), caught.value.reason
        assert caught.value.stage == MODULE
    assert guard.check(module, (x,), {}) is not None, "the change was undone"


def test_all_of_it_as_it_was_is_dispatched(module):
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 1


def test_another_base_of_a_class_is_seen_and_named():
    """No dictionary of the class is written to. Restored bases are equal, not identical: a call is compared whole."""

    class Low:
        offset = 1.0

    class High:
        offset = 2.0

    class Offset(Low):
        def __call__(self, x):
            return x + self.offset

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(6, 6), Offset()

        def forward(self, x):
            return self.act(self.linear(x))

    module, x = Adds(), torch.ones(4, 6)
    add_tvm_dispatch(module, x)
    module(x)
    Offset.__bases__ = (High,)
    torch.testing.assert_close(module(x), module.forward(x))
    assert list(stats(module).misses) == ["attribute 'offset' of class Offset changed"]
    Offset.__bases__ = (Low,)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 2


def test_a_parent_kept_in_an_attribute_is_not_walked_through():
    """A back-reference would make everything that a parent holds a condition; forward reads nothing of it."""
    parent = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    parent.scale = 2.0
    parent[0].above = [parent]
    add_tvm_dispatch(parent[0], torch.ones(4, 6))
    parent[1] = nn.Sigmoid()
    parent(torch.ones(4, 6))
    assert stats(parent[0]).hits == 1
    parent.scale = 3.0
    parent(torch.ones(4, 6))
    assert stats(parent[0]).hits == 2


class ReadsScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.loose_scale = 2.0

    def forward(self, x):
        return self.linear(x) * self.loose_scale


loose_scale = 1.0  # a script's variable of the same name


def test_an_attribute_is_no_global(monkeypatch):
    """Scripts have variables called as attributes are (``model``, ``scale``), and assign to them at every step."""
    module = add_tvm_dispatch(ReadsScale(), torch.ones(4, 6))
    monkeypatch.setitem(globals(), "loose_scale", 3.0)
    module(torch.ones(4, 6))
    assert stats(module).hits == 1
    module.loose_scale = 3.0
    module(torch.ones(4, 6))
    assert list(stats(module).misses) == ["attribute 'loose_scale' of the module changed: from 2.0 to 3.0"]
