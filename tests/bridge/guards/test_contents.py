"""Contents that a run reads: each object once, its changes seen, restored in the same object."""

import functools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.guards.insides import Insides
from bridge.guards.watched import Contents, Place


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


def seen(value) -> Insides:
    """A world in which all contents of a value were read."""
    world, waiting = Insides({}), [value]
    world.know(value, Place("global", "value"))
    while waiting:
        each = waiting.pop()
        world.whole(each)
        waiting += world.inside(each, 1)
        if isinstance(each, Settings | Slots):
            waiting += [part for name in ("scale", "inner") for part in world.attribute(each, name)]
        if isinstance(each, functools.partial):
            waiting += each.args
    return world


CHANGES = {
    "list": (lambda: [1, 2], lambda v: v.append(3)),
    "entry": (lambda: [1, 2], lambda v: v.__setitem__(0, 5)),
    "dict": (lambda: {"a": 1}, lambda v: v.update(a=2)),
    "new key": (lambda: {"a": 1}, lambda v: v.update(b=1)),
    "place of a key": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "place of an ordered key": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "ordered keys": (lambda: OrderedDict(a=1, b=2), lambda v: v.update(c=v.pop("a"))),
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
    "one of many": (lambda: {i: [i, [i]] for i in range(100)}, lambda v: v[70][1].append(2)),
    "border of many": (lambda: [[1], [2, 3]] * 50, lambda v: v[0].append(v[1].pop(0))),
    "key of many": (lambda: dict.fromkeys(range(100)), lambda v: v.pop(3)),
    "argument of a partial": (lambda: functools.partial(max, [1]), lambda v: v.args[0].append(2)),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_and_put_back_in_the_very_object(make, change):
    value = make()
    world = seen(value)
    assert world.items and not world.changes()
    change(value)
    assert world.changes()
    world.restore()
    assert not world.changes() and repr(value).partition(" at ")[0] == repr(make()).partition(" at ")[0]
    assert isinstance(value, Slots) is False or value.scale == 1.0


def test_each_object_is_looked_at_once_and_circles_end():
    value = [1]
    value.append(value)
    world = Insides({})
    world.know(value)
    world.whole(value)
    assert len(world.items) == 1


def test_many_plain_entries_are_one_place_and_nothing_in_it_is_followed():
    world, value = Insides({}), {each: [each, (each,)] for each in range(10_000)}
    world.know(value)
    for _ in range(3):
        world.whole(value)
        assert not world.inside(value, 2)
    assert len(world.items) == 1 and len(world._known) == 1


@pytest.mark.parametrize("value", [3, "name", (1, 2), Color.RED, torch.zeros(2), nn.ReLU, torch.float32], ids=repr)
def test_what_cannot_change_has_no_contents(value):
    world = Insides({})
    world.know(value)
    world.whole(value)
    assert not any(isinstance(item, Contents) for item in world.items.values())


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


KEPT = {}


class OfValues(nn.Module):
    def forward(self, x):
        return x * float(next(each for _, each in KEPT.items())[0])


@pytest.mark.parametrize("kind", [list, bytearray, deque, np.array])
def test_an_equal_object_in_its_place_is_looked_into_from_then_on(kind):
    """A later change of the new object does not write to the dictionary."""
    KEPT["v"] = kind([2])
    module, x = OfValues(), torch.ones(3)
    add_tvm_dispatch(module, x)
    KEPT["v"] = kind([2])
    assert [module(x)[0].item(), module(x)[0].item(), stats(module).hits] == [2, 2, 2]
    KEPT["v"][0] = 3
    assert module(x)[0].item() == 3


HELD = {}


def _around():
    held = []

    def put(value):
        nonlocal held
        held = value

    return put, lambda: held


PUT, GET = _around()
PLACES = {
    "attribute": (lambda m, made: setattr(m, "log", made), lambda m: m.log),
    "of a module inside": (lambda m, made: setattr(m.linear, "log", made), lambda m: m.linear.log),
    "of the class": (lambda m, made: setattr(type(m), "log", made), lambda m: type(m).log),
    "of a file": (lambda m, made: HELD.__setitem__("log", made), lambda m: HELD["log"]),
    "closure": (lambda m, made: PUT(made), lambda m: GET()),
}


class Resets(nn.Module):
    """Begins each call with a container of its own, which the caller fills."""

    def __init__(self, put, make):
        super().__init__()
        self.linear, self.put, self.make = nn.Linear(4, 4), put, make

    def forward(self, x):
        self.put(self, self.make())
        return self.linear(x)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [lambda: [1], lambda: {"a": 1}, lambda: [[1]], lambda: ([1], 2), lambda: {1}])
def test_a_container_that_forward_makes_anew_is_as_in_eager(place, make):
    put, get = PLACES[place]
    module, x, wanted = Resets(put, make), torch.randn(3, 4), make()
    add_tvm_dispatch(module, x)
    module(x)
    module(x)
    assert stats(module).hits == 2
    held = get(module)
    inner = held[0] if type(held) is tuple or (type(held) is list and type(held[0]) is list) else held
    inner.clear()
    module(x)
    assert get(module) == wanted and stats(module).misses
