"""Writes to code, defaults, classes and bases: Python reports them; a matching call compares these only afterwards."""

import inspect

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.guards import rebound_count


def factor(by: float = 2.0, *, more: float = 1.0) -> float:
    return by * more


class Base:
    by = 3.0


class Other:
    by = 5.0


class Between(Base):
    pass


class Held(Between):
    pass


HELD = Held()


class Scaled(nn.Module):
    def forward(self, x):
        return x * factor() * HELD.by


WRITES = {
    "code": (factor, "__code__", (lambda by=2.0, *, more=1.0: by + more).__code__, "factor"),
    "defaults": (factor, "__defaults__", (7.0,), "default arguments of factor"),
    "keyword defaults": (factor, "__kwdefaults__", {"more": 7.0}, "default arguments of factor"),
    "class": (HELD, "__class__", Other, "HELD"),
    "bases": (Between, "__bases__", (Other,), "by"),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_a_write_is_a_miss_and_back_again_a_hit(name):
    owner, attribute, value, reason = WRITES[name]
    module, x, before = Scaled(), torch.randn(3), getattr(owner, attribute)
    add_tvm_dispatch(module, x)
    module(x), module(x)
    count = rebound_count()[0]
    setattr(owner, attribute, value)
    try:
        assert rebound_count()[0] != count
        expected = x * factor() * HELD.by
        for _ in range(3):
            assert torch.equal(module(x), expected)
    finally:
        setattr(owner, attribute, before)
    assert stats(module).hits == 2
    assert sum(stats(module).misses.values()) == 3 and all(reason in each for each in stats(module).misses)
    module(x), module(x)
    assert stats(module).hits == 4


EMPTY: dict[str, float] = {}


class Options:
    scale = 2.0


class Listed(nn.Module):
    """Reads a dictionary without entries, and all entries of a class, as transformers' configurations do."""

    def forward(self, x):
        return x * dict(inspect.getmembers(Options))["scale"] + sum(EMPTY.values())


def test_an_empty_dictionary_and_the_entries_of_a_class_are_compared_after_writes_alone(monkeypatch):
    module, x = Listed(), torch.randn(3)
    add_tvm_dispatch(module, x)
    tree = stats(module).entries[0].guard.tree
    looked, look = [], type(tree).look
    monkeypatch.setattr(type(tree), "look", lambda *args: looked.append(1) or look(*args))
    for _ in range(4):
        module(x)
    assert len(looked) <= 2 and stats(module).hits == 4
    EMPTY.update(more=1.0)
    torch.testing.assert_close(module(x), x * 2 + 1)
    EMPTY.clear()
    monkeypatch.setattr(Options, "scale", 3.0)
    torch.testing.assert_close(module(x), x * 3)
    monkeypatch.undo()
    monkeypatch.setattr(Options, "late", 3.0, raising=False)
    module(x)
    assert stats(module).hits == 4 and sum(stats(module).misses.values()) == 3
    monkeypatch.undo()
    module(x)
    assert stats(module).hits == 5


def test_the_check_compares_again_after_a_write_elsewhere_alone(monkeypatch):
    module, x = Scaled(), torch.randn(3)
    add_tvm_dispatch(module, x)
    tree = stats(module).entries[0].guard.tree
    looked, look = [], type(tree).look
    monkeypatch.setattr(type(tree), "look", lambda *args: looked.append(1) or look(*args))
    for _ in range(5):
        module(x)
    looked.clear()
    module(x)
    assert not looked
    Other().__class__ = Base
    for _ in range(5):
        module(x)
    assert len(looked) == 2, "once more, since Python reports a write just before it happens"
    assert stats(module).hits == 11
