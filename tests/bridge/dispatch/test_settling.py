"""Writes of the first call alone: not done by adding, done by the first hit."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.beside import beside, double

TABLE: dict = {}
FLAG = False


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4).double(), write
        self.config, self.history = SimpleNamespace(seen=set(), last=None), [0, 0]
        self.names, self.table, self.size, self.mask = set(), {}, None, None
        self.filled, self.queue = defaultdict(float), deque(maxlen=1)
        self.held = self.names, self.table, self.filled, self.queue  # the very objects are written

    def forward(self, x):
        self.write(self, x)
        return self.linear(x)


def sets_flag(net, x):
    global FLAG
    FLAG = True


WRITES = {
    "a set of a configuration": lambda net, x: net.config.seen.add("shape"),
    "a field of a configuration": lambda net, x: setattr(net.config, "last", 3),
    "an entry of a list": lambda net, x: net.history.__setitem__(0, 7),
    "a table of the file": lambda net, x: TABLE.update(n=5),
    "a global": sets_flag,
    "sizes": lambda net, x: net.config.seen.add(str(x.shape)),
    "sizes of one slot": lambda net, x: net.config.seen.add(8 * x.shape[0]),
    "an attribute": lambda net, x: setattr(net, "size", x.shape),
    "a new attribute": lambda net, x: setattr(net, "ready", True),
    "an attribute of a layer": lambda net, x: setattr(net.linear, "ready", True),
    "a set of the module's": lambda net, x: net.names.add(str(x.shape)),
    "a table of the module's": lambda net, x: net.table.update(n=x.shape[0]),
    "a default of a table": lambda net, x: net.filled["n"],
    "a queue": lambda net, x: net.queue or net.queue.append(3),
    "a mask": lambda net, x: setattr(net, "mask", torch.ones(2).tolist() if net.mask is None else net.mask),
    "an attribute of a parameter": lambda net, x: setattr(net.linear.weight, "seen", True),
}


def state(net):
    own = [getattr(net, name, None) for name in ("names", "table", "filled", "queue", "held", "size", "mask", "ready")]
    return str((net.config, net.history, TABLE, FLAG, vars(net.linear.weight), own, vars(net.linear).get("ready")))


def make(write):
    global FLAG
    TABLE.clear()
    FLAG = False
    return Net(write)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_first_hit_writes(write):
    x = double(1, 3, 4)
    module = make(write)
    before = state(module)
    module(x)
    wanted = state(module)
    module = make(write)
    add_tvm_dispatch(module, x)
    add_tvm_dispatch(module, x)
    assert state(module) == before
    module(x)
    assert state(module) == wanted
    module(x)
    assert (stats(module).hits, state(module)) == (2, wanted)


@pytest.mark.parametrize("write", [WRITES["an entry of a list"], WRITES["sizes"]], ids=["a list", "sizes"])
def test_another_call_does_what_eager_does(write):
    x = double(1, 3, 4)
    module = make(write)
    add_tvm_dispatch(module, x)
    before = state(module)
    with pytest.raises(RuntimeError, match="shapes"):
        module(double(2, 3, 5))
    assert state(module) != before  # as eager, before it raised
    assert stats(module).hits == 0


@pytest.mark.parametrize("write", ["sizes", "sizes of one slot"])
def test_sizes_that_vary_leave_no_symbols(write):
    def step(module, _, i):
        y = module(double(i, 3 + i % 3, 4))
        y.sum().backward()
        return y, *sorted(module.config.seen)

    beside(lambda: (make(WRITES[write]), None), step, lambda m, own: (double(9, 3, 4),), steps=6, on_miss="compile")


def test_an_attribute_of_a_parameter_that_forward_reads_is_guarded():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x):
            return self.linear(x) * getattr(self.linear.weight, "scale", 1.0)

    module, x = Scales(), double(1, 3, 4)
    wanted = module(x)
    add_tvm_dispatch(module, x)
    module.linear.weight.unread = object()
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 1
    module.linear.weight.scale = 3.0
    torch.testing.assert_close(module(x), 3 * wanted)
    assert dict(stats(module).misses) == {"attribute 'scale' of 'linear.weight' changed": 1}
    module.linear.weight = nn.Parameter(module.linear.weight.detach())
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 2


class Lazy:
    """A value that it computes once is kept until it is deleted."""

    base, made = 2.0, None

    def __init__(self):
        self.table = {}

    @functools.cached_property
    def cached(self):
        return self.base

    def once(self):
        if self.made is None:
            self.made = self.computed()
        return self.made

    def entry(self):
        if "n" not in self.table:
            self.table["n"] = self.computed()
        return self.table["n"]

    def computed(self):
        return self.base * 2

    def forget(self):
        self.__dict__.pop("cached", None)
        self.__dict__.pop("made", None)
        self.table.clear()


@pytest.mark.parametrize("changed", ["before the first call", "after the value is deleted", "nothing"])
@pytest.mark.parametrize("read", [lambda o: o.cached, Lazy.once, Lazy.entry], ids=["cached_property", "once", "entry"])
def test_what_the_first_call_alone_reads_is_a_condition_of_its_writes(read, changed):
    class Own(Lazy):
        pass

    def step(i):
        if i == (0 if changed == "before the first call" else 2 if changed != "nothing" else -1):
            Own.base = 3.0
        if i == 2:
            own.forget()
        value = Own.base if read(Own()) == Own.base else 2 * Own.base  # of a new object
        x = double(i, 3, 4)
        wanted = linear(x) * (value if i in (0, 2) else read(own))
        torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)
        assert read(own) == value

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * read(own)

    own, module = Own(), Scaled(4, 4).double()
    linear = nn.Linear(4, 4).double()
    linear.load_state_dict(module.state_dict())
    add_tvm_dispatch(module, double(9, 3, 4))
    assert not own.table and not {"cached", "made"} & vars(own).keys(), "adding leaves nothing"
    for i in range(4):
        step(i)
    hits = stats(module).hits
    assert hits == 4 if changed == "nothing" else hits < 4
