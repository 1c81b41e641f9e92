"""What attributes reach: every mutable object once, its changes seen, its contents put back in the very object."""

import functools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.state.reachable import Reached


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


@dataclass
class Settings:
    scale: float = 1.0
    inner: list = field(default_factory=lambda: [1, {"rate": 0.5}])


class Color(Enum):
    RED = 1


def reached(value) -> Reached:
    found = Reached()
    found.add("value", value)
    return found


def changed(found: Reached) -> bool:
    return not all(contents.unchanged() for contents in found.contents)


CHANGES = {
    "list": (lambda: [1, 2], lambda v: v.append(3)),
    "entry": (lambda: [1, 2], lambda v: v.__setitem__(0, 5)),
    "dict": (lambda: {"a": 1}, lambda v: v.update(a=2)),
    "new key": (lambda: {"a": 1}, lambda v: v.update(b=1)),
    "order of keys": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "in a tuple": (lambda: ([1], 2), lambda v: v[0].append(2)),
    "in a dict in a list": (lambda: [{"a": {"b": 1}}], lambda v: v[0]["a"].update(b=2)),
    "array": (lambda: np.zeros(3), lambda v: v.__setitem__(1, 1.0)),
    "sign of a zero": (lambda: [0.0], lambda v: v.__setitem__(0, -0.0)),
    "type": (lambda: [1], lambda v: v.__setitem__(0, True)),
    "field": (Settings, lambda v: setattr(v, "scale", 2.0)),
    "in a field": (Settings, lambda v: v.inner[1].update(rate=0.1)),
    "slot": (Slots, lambda v: setattr(v, "scale", 2.0)),
    "argument of a partial": (lambda: functools.partial(max, [1]), lambda v: v.args[0].append(2)),
    "setting of a module": (nn.Dropout, lambda v: setattr(v, "p", 0.1)),
    "mode of a module": (nn.Dropout, lambda v: v.eval()),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(make, change):
    value = make()
    found = reached(value)
    assert found.contents and not changed(found)
    change(value)
    assert changed(found)


PUT_BACK = [name for name in CHANGES if name not in ("order of keys", "setting of a module", "mode of a module")]


@pytest.mark.parametrize("name", PUT_BACK)
def test_and_put_back_in_the_very_object(name):
    make, change = CHANGES[name]
    value = make()
    found = reached(value)
    change(value)
    for contents in found.contents:
        contents.restore()
    assert not changed(found) and repr(value).partition(" at ")[0] == repr(make()).partition(" at ")[0]
    assert isinstance(value, Slots) is False or value.scale == 1.0


def test_each_object_is_looked_at_once_and_circles_end():
    value = [1]
    value.append(value)
    found = reached({"a": value, "b": value})
    assert len(found.contents) == 2


@pytest.mark.parametrize("value", [3, "name", (1, 2), Color.RED, torch.zeros(2), nn.ReLU, torch.float32], ids=repr)
def test_what_cannot_change_has_no_contents(value):
    assert not reached(value).contents


def test_functions_and_the_users_classes_are_handed_on():
    def activation(x):
        return x

    found = reached([activation, Settings(), Settings])
    assert found.functions == [activation] and list(found.kinds) == [Settings]


def test_a_registered_module_is_left_to_its_own_guard():
    layer = nn.Dropout()
    found = Reached(registered=frozenset([layer]))
    found.add("value", layer)
    assert not found.contents


def _raises(*args, **kwargs):
    raise NotImplementedError


def _refusing(kind):
    methods = ("__len__", "keys", "values", "items", "count", "index", "__contains__", "__iter__", "__copy__")
    names = [name for name in methods if hasattr(kind, name) or name == "__copy__"]
    return type(f"Refusing{kind.__name__}", (kind,), dict.fromkeys(names, _raises))


GIVEN = {tuple: (2.0, 1.0), list: [2.0, 1.0], dict: {0: 2.0, 1: 1.0}, OrderedDict: {0: 2.0}, set: {2.0}, deque: [2.0]}


@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_a_class_whose_len_and_items_raise_is_seen_as_it_is_stored(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.held = _refusing(kind)(GIVEN[kind])

        def forward(self, x):
            return self.linear(x) * (self.held[0] if kind in (tuple, list, dict, OrderedDict) else 2.0)

    module, x = Net(), torch.randn(3, 4)
    wanted = module(x)
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 1
    if kind in (list, dict, OrderedDict):
        module.held[0] = 3.0
        torch.testing.assert_close(module(x), wanted * 1.5)
        assert "attribute 'held'" in str(dict(stats(module).misses))
