"""Counters that forward counts up by a constant are counted by a compiled call; any other use of one is refused."""

import copy

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.calls = 5

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x * self.weight)


class Counts(nn.Module):
    """Counts by one, by steps, downwards, and in a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.seen, self.left, self.settled = 0, 10**30, None

    def forward(self, x):
        self.seen = 2 + self.seen + 1
        self.left -= 4
        self.settled = True
        return self.layer(self.layer(x))


def counts(module):
    return module.seen, module.left, module.layer.calls, module.settled


@pytest.mark.composes("counters: `self.calls += 1`", "counted by a compiled call as by forward", section="Guards")
def test_counters_count_as_in_eager():
    module = Counts()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, X)
    assert counts(module)[:3] == counts(eager)[:3], "adding counts nothing"
    for each in (X, X, X[:2], X):
        assert_same(run(module, Call((each,))), run(eager, Call((each,))), rtol=1e-5, atol=1e-6)
        assert counts(module) == counts(eager)
    assert stats(module).hits == 3
    module.layer.calls = eager.layer.calls = -7  # its value is nothing to the entry
    module(X), eager(X)
    assert counts(module) == counts(eager) and stats(module).hits == 4
    module.layer.calls = True
    module(X)
    assert stats(module).hits == 4


class Reads(Layer):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        self.calls += 1
        return self.read(x * self.weight, self)


READS = {
    "scaled": lambda x, m: x * m.calls,
    "every other": lambda x, m: x if m.calls % 2 else -x,
    "returned": lambda x, m: (x, m.calls),
    "shape": lambda x, m: x.repeat(m.calls, 1),
    "index": lambda x, m: x[m.calls % 4],
    "type": lambda x, m: x * (m.calls if type(m.calls) is int else 1),
    "text": lambda x, m: x * len(f"{m.calls}"),
    "copied": lambda x, m: (setattr(m, "other", m.calls), x)[1],
    "truth": lambda x, m: x if m.calls else -x,
    "doubled": lambda x, m: (setattr(m, "calls", m.calls * 2), x)[1],
    "shape's": lambda x, m: (setattr(m, "calls", m.calls + x.shape[0]), x)[1],
}


@pytest.mark.parametrize("read", READS)
def test_a_counter_that_is_read_is_refused(read):
    module = Reads(READS[read])
    if read == "shape's":  # a constant of the entry
        add_tvm_dispatch(module, X)(X)
        assert module.calls == 5 + 1 + 4
        return
    with pytest.raises(UnsupportedModule, match="Python state that forward changes at every call"):
        add_tvm_dispatch(module, X)
    assert module.calls == 5


class OfTheClass(Layer):
    """Its counter is the class's until the first call sets one of the module's."""

    calls = 3

    def __init__(self):
        super().__init__()
        del self.calls


@pytest.mark.parametrize("inner", [False, True])
def test_a_counter_that_begins_as_a_class_attribute(inner):
    modules = [nn.Sequential(OfTheClass()) if inner else OfTheClass() for _ in range(2)]
    add_tvm_dispatch(modules[0], X)
    layers = [each[0] if inner else each for each in modules]
    assert "calls" not in layers[0].__dict__
    for calls in (4, 5, 6):
        assert torch.equal(modules[0](X), modules[1](X))
        assert [each.__dict__["calls"] for each in layers] == [calls, calls]
    assert stats(modules[0]).hits == 2
    for each in layers:
        del each.calls
    assert torch.equal(modules[0](X), modules[1](X))
    assert [each.__dict__["calls"] for each in layers] == [4, 4]
