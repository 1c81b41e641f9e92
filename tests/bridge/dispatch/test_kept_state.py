"""Places that each call sets anew (losses, features of hooks): a compiled call leaves eager's values there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils import prune

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.pytrees import packed
from bridge.base.torch_internals import pytree
from tests.bridge.beside import beside, double


class Net(nn.Module):
    def __init__(self, then, **own):
        super().__init__()
        self.linear, self.then = nn.Linear(4, 4).double(), then
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x):
        h = self.linear(x)
        return self.then(self, F.dropout(h, 0.3)), h.square().mean()


def sets(name, value):
    return lambda m, h: (setattr(m, name, value(h, m)), h)[1]


def accumulates(m, h):
    m.loss = 0.0
    m.loss += h.mean()
    m.loss = m.loss + h.std()
    return h * m.loss


def fills(m, h):
    m.losses["kl"] = h.mean()
    m.seen.clear()
    m.seen.append(h.tanh())
    m.all.append(h.detach())
    m.state.last = h.sum()
    return h


def carries(m, h):
    m.hidden = torch.tanh(h.detach().mean(0) + m.hidden)
    return h * m.hidden


SETS = {
    "loss": lambda: Net(sets("loss", lambda h, m: h.mean())),
    "was there": lambda: Net(sets("loss", lambda h, m: h.mean()), loss=0.0),
    "detached": lambda: Net(sets("map", lambda h, m: h.detach().softmax(-1))),
    "what is returned": lambda: Net(sets("out", lambda h, m: h)),
    "containers": lambda: Net(sets("losses", lambda h, m: {"a": [h.mean(), 3], "b": (h.max(),)})),
    "distribution": lambda: Net(sets("dist", lambda h, m: Normal(h, m.linear.bias.exp()))),
    "object": lambda: Net(sets("info", lambda h, m: SimpleNamespace(loss=h.mean(), rows=h.shape[0]))),
    "accumulated": lambda: Net(accumulates),
    "filled": lambda: Net(fills, losses={"lr": 3}, seen=[], all=[], state=SimpleNamespace(last=None)),
    "carried": lambda: Net(carries, hidden=double(3, 4)),
    "two layers": lambda: nn.Sequential(Net(sets("loss", lambda h, m: h.mean())), Pick(), Net(accumulates)),
}


class Pick(nn.Module):
    def forward(self, pair):
        return pair[0].tanh()


def kept(module):
    """The values in the places, as leaves."""
    names = ("loss", "map", "out", "losses", "dist", "info", "seen", "all", "state", "hidden")
    found = [(n, getattr(m, n)) for m in module.modules() for n in names if isinstance(m, Net) and hasattr(m, n)]
    return [leaf for _, value in found for leaf in pytree.tree_leaves(packed(value))]


def step(module, own, i):
    out, loss = module(double(10 + i, 3, 4))
    found = kept(module)
    reached = [each.mean() for each in found if isinstance(each, torch.Tensor) and each.requires_grad]
    sum(reached, loss + out.square().sum()).backward()
    return out, found


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("samples", [True, False])
def test_a_call_leaves_what_eager_leaves(kind, samples):
    beside(lambda: (SETS[kind](), None), step, (lambda m, own: (double(9, 3, 4),)) if samples else None)


def test_adding_leaves_nothing_and_the_first_call_a_list_of_one():
    module = SETS["filled"]()
    add_tvm_dispatch(module, double(9, 3, 4))
    assert module.losses == {"lr": 3} and module.all == [] and module.state.last is None
    module(double(9, 3, 4))
    assert len(module.all) == len(module.seen) == 1


def hooked(found, kind):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    hooks = {
        "features": lambda m, args, out: found.__setitem__("x", out),
        "appended": lambda m, args, out: found.setdefault("l", []).append(out.detach()),
        "attribute": lambda m, args, out: setattr(m, "last", out),
        "nothing": lambda m, args, out: None,
    }
    module[1].register_forward_hook(hooks[kind])
    return module


@pytest.mark.composes(
    "hooks on modules inside",
    "forward hooks are traced, and leave the values that they keep; others are refused, or eager with a reason",
    section="The module stays the user's",
)
@pytest.mark.parametrize("kind", ["features", "appended", "attribute", "nothing"])
def test_hooks_that_return_nothing(kind):
    def make():
        found = {}
        return hooked(found, kind), found

    def step(module, found, i):
        out = module(double(i, 3, 4))
        extra = [*found.values(), getattr(module[1], "last", out)]
        (out.square().sum() + sum(each.sum() for each in extra if isinstance(each, torch.Tensor))).backward()
        return out, extra

    beside(make, step, lambda m, found: (double(9, 3, 4),))


class OwnPruning(prune.RandomUnstructured):
    def apply_mask(self, module):
        return 2 * super().apply_mask(module)


def test_a_hook_of_a_users_own_class_that_sets_the_weight():
    def make():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        torch.manual_seed(0)
        OwnPruning.apply(module[0], "weight", 0.5)
        return module, None

    def step(module, own, i):
        out = module(double(i, 3, 4))
        out.square().sum().backward()
        return out, module[0].weight

    beside(make, step, lambda m, own: (double(9, 3, 4),))


READS = {
    "grown": (lambda m, h: (m.log.append(h.mean()), h * len(m.log))[1], {"log": []}),
    "first of all": (lambda m, h: (m.log.append(h.detach().mean()), h * m.log[0])[1], {"log": []}),
    "numbers": (lambda m, h: (setattr(m, "rate", m.rate * 0.5), h * m.rate)[1], {"rate": 1.0}),
    "objects": (lambda m, h: (setattr(m, "last", m.linear), h)[1] * len(m.log.append(m) or m.log), {"log": []}),
}


@pytest.mark.parametrize("kind", READS)
def test_what_is_read_and_changed_is_refused_by_its_name(kind):
    then, own = READS[kind]
    with pytest.raises(UnsupportedModule, match=r"self\.(log|rate): Python state that forward changes at every call"):
        add_tvm_dispatch(Net(then, **own), double(9, 3, 4))


def test_a_users_value_in_the_place_is_nothing_to_the_entry():
    module = Net(sets("loss", lambda h, m: h.mean()))
    add_tvm_dispatch(module, double(9, 3, 4))
    for value in (None, 7, double(1, 2)):
        module.loss = value
        module(double(9, 3, 4))
        assert isinstance(module.loss, torch.Tensor) and module.loss.shape == ()
    assert stats(module).hits == 3


class Stateful(nn.Module):
    """Goes on from the last call's state, if there is one."""

    def __init__(self, begin):
        super().__init__()
        self.linear, self.hidden = nn.Linear(8, 4).double(), begin

    def forward(self, x):
        hidden = self.hidden if isinstance(self.hidden, torch.Tensor) else x.new_zeros(len(x), 4)
        hidden = hidden.expand(len(x), 4).double()
        out = torch.tanh(self.linear(torch.cat([x, hidden], 1)))
        self.hidden = out.detach()
        return out


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("begin", [None, 0.0])
@pytest.mark.parametrize("samples", [True, False])
def test_what_is_carried_on_begins_with_no_tensor(samples, begin, is_inner):
    """Calls that begin anew are eager's, all others hits; adding leaves the module as it was."""

    def make():
        module = Stateful(begin)
        return (nn.Sequential(nn.Linear(4, 4).double(), module) if is_inner else module), module

    def step(module, inner, i):
        if i == 4:
            inner.hidden = begin
        out = module(double(i, 3, 4))
        out.square().sum().backward()
        return out, inner.hidden

    beside(make, step, (lambda m, inner: (double(9, 3, 4),)) if samples else None, steps=7, hits=5)
    module, inner = make()
    add_tvm_dispatch(module, double(9, 3, 4))
    assert inner.hidden is begin


STARTS = {
    "a leaf": lambda: double(1, 3, 4, requires_grad=True),
    "computed": lambda: double(1, 3, 4, requires_grad=True) * 2,
    "fewer dimensions": lambda: double(1, 4),
    "another type": lambda: double(1, 3, 4).float(),
    "expanded": lambda: double(1, 4).expand(3, 4),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("samples", [True, False])
def test_what_is_carried_on_begins_with_another_tensor(samples, start):
    """A first value of other metadata, or that requires grad, gets its gradient; later calls hit."""

    def make():
        module = Stateful(STARTS[start]())
        return module, module

    def step(module, own, i):
        module.hidden = STARTS[start]() if i == 4 else module.hidden
        first = module.hidden
        first.retain_grad() if first.requires_grad else None
        out = module(double(i, 3, 4))
        out.square().sum().backward()
        return out, first.grad, module.hidden

    beside(make, step, (lambda m, own: (double(9, 3, 4),)) if samples else None, steps=7, hits=4)
