"""Attributes of a module that were computed with a gradient: inputs of the call, which get their gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, examine, lower, stats
from tests.bridge.beside import beside, double

SHAPES = {"vector": (4,), "scalar": (), "matrix": (3, 4)}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        return self.linear(x) * self.w


def of_raw(shape=(4,), function=lambda raw: raw * 2):
    def make():
        return nn.Sequential(Scaled(), nn.Tanh()), SimpleNamespace(raw=double(1, *shape, requires_grad=True))

    def computed(module, own):
        module[0].w = function(own.raw)

    return make, computed


def step_of(computed, backward):
    def step(module, own, i):
        computed(module, own)
        y = module(double(10 + i, 3, 4))
        backward(y, own)
        grad, own.raw.grad = own.raw.grad, None
        return y, grad

    return step


def plain(y, own):
    y.square().sum().backward()


def twice(y, own):
    (slope,) = torch.autograd.grad(y.square().sum(), own.raw, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize("backward", [plain, twice])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_computed_attribute_gets_its_gradient(shape, backward):
    make, computed = of_raw(shape)
    beside(make, step_of(computed, backward), lambda m, own: computed(m, own) or (double(9, 3, 4),))


@pytest.mark.parametrize("function", [lambda raw: raw.sin(), lambda raw: raw.t() * 1, lambda raw: raw[:, :4]])
def test_it_may_be_any_function_of_the_users(function):
    make, computed = of_raw((4, 6) if function(torch.ones(4, 6)).shape == (4, 4) else (4, 4), function)

    def step(module, own, i):
        computed(module, own)
        y = module(double(10 + i, 4, 4))
        y.sum().backward()
        grad, own.raw.grad = own.raw.grad, None
        return y, grad

    beside(make, step, lambda m, own: computed(m, own) or (double(9, 4, 4),))


def test_a_weight_that_another_network_makes():
    def make():
        return nn.Linear(4, 4).double(), nn.Linear(2, 16).double()

    def computed(module, maker, i):
        del module._parameters["weight"]
        module.weight = maker(double(i, 2)).view(4, 4)

    def step(module, maker, i):
        module.weight = maker(double(i, 2)).view(4, 4)
        y = module(double(10 + i, 3, 4))
        y.square().sum().backward()
        grads = [each.grad for each in maker.parameters()]
        maker.zero_grad()
        return y, grads

    def made():
        module, maker = make()
        computed(module, maker, 0)
        return module, maker

    beside(made, step, lambda m, own: (double(9, 3, 4),))


class WeightDrop(nn.Module):
    """As fastai's AWD-LSTM has it: a layer inside whose weight is a dropout of this module's."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(double(3, 4, 4).clone())
        self.inner = nn.Linear(4, 4).double()
        del self.inner.weight
        self.inner.weight = self.raw.detach().clone()

    def forward(self, x):
        self.inner.weight = nn.functional.dropout(self.raw, 0.4, self.training)
        return self.inner(x.tanh())


@pytest.mark.parametrize("options", [{}, {"whole": False}], ids=["whole", "parts"])
def test_a_weight_that_each_call_drops_anew(options):
    def make():
        return nn.Sequential(WeightDrop(), nn.Linear(4, 4).double()), None

    def step(m, own, i):
        out = m(double(10 + i, 3, 4))
        out.square().sum().backward()
        return out, m[0].inner.weight.detach().clone()

    beside(make, step, lambda m, own: (double(9, 3, 4),), hits=1, **options)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(double(1, 4, 4)), nn.Parameter(double(2, 4, 1))
        self.calls = torch.zeros(())

    def forward(self, x):
        return F.linear(x, self.weight)


def sets_weight(module, args):
    module.weight = module.g * module.v / module.v.norm(dim=1, keepdim=True)


def doubles(module, args):
    return (args[0] * 2,)


def counts(module, args):
    module.v.uses = getattr(module.v, "uses", 0) + 1
    module.calls.add_(1)
    torch.rand(3)


@pytest.mark.parametrize("hooks", [[sets_weight], [doubles, sets_weight], [counts, sets_weight]])
def test_the_modules_own_pre_hooks_run_on_the_sample(hooks):
    def make():
        module = Normed()
        for hook in hooks:
            module.register_forward_pre_hook(hook)
        return module, None

    def step(module, _, i):
        y = module(double(10 + i, 3, 4))
        y.square().sum().backward()
        return y, module.calls, getattr(module.v, "uses", 0)

    beside(make, step, lambda m, own: (double(9, 3, 4),))


@pytest.mark.parametrize("act", [add_tvm_dispatch, examine, lower])
def test_they_leave_nothing(act):
    module = Normed()
    for hook in (counts, sets_weight, doubles):
        module.register_forward_pre_hook(hook)
    torch.manual_seed(0)
    x, state = double(9, 3, 4), torch.get_rng_state()
    act(module, x)
    assert not hasattr(module, "weight")
    assert not hasattr(module.v, "uses")
    assert module.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, double(9, 3, 4))


HELD = {"w": None}


class Held(Scaled):
    def forward(self, x):
        return self.linear(x) * (HELD["w"] if self.held is None else self.held.w)


@pytest.mark.parametrize("where", ["a global", "an object in C"])
def test_a_computed_tensor_elsewhere_gets_its_gradient(where):
    def make():
        module = Held()
        module.held = None if where == "a global" else SimpleNamespace()
        return module, SimpleNamespace(raw=double(1, 4, requires_grad=True))

    def step(module, own, i):
        if where == "a global":
            HELD["w"] = own.raw * 2
        else:
            module.held = SimpleNamespace(w=own.raw * 2)
        y = module(double(10 + i, 3, 4))
        y.square().sum().backward()
        grad, own.raw.grad = own.raw.grad, None
        return y, grad

    beside(make, step, None)


def test_a_leaf_among_the_attributes_gets_its_gradient():
    module = Scaled()
    module.w = double(3, 4, requires_grad=True)
    x = double(9, 3, 4)
    (wanted,) = torch.autograd.grad(module(x).sum(), module.w)
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    torch.testing.assert_close(module.w.grad, wanted, rtol=1e-10, atol=0)
    assert stats(module).hits == 1


GLOBAL = {"w": double(7, 4)}


class Contains(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.run, self.config = nn.Linear(4, 4).double(), run, SimpleNamespace(w=double(4, 4), k=2)
        self.ws, self.named, self.tied = [double(1, 4), double(2, 4)], {"a": (double(3, 4), 2)}, [self.linear.bias]
        self.again = self.scale = double(5, 4)

    def forward(self, x):
        return self.run(self, self.linear(x))


def kinds(m):
    return m.ws[0].is_leaf + m.ws[0].storage_offset()


ANEW = {
    "list": (lambda m, h: h * m.ws[0] + m.ws[1], lambda m, i: setattr(m, "ws", [double(i, 4), double(i + 1, 4)])),
    "item": (lambda m, h: h * m.ws[0] + m.ws[1], lambda m, i: m.ws.__setitem__(1, double(i, 4))),
    "loop": (lambda m, h: sum(h * w for w in m.ws), lambda m, i: m.ws.reverse()),
    "inside": (lambda m, h: h * m.named["a"][0], lambda m, i: setattr(m, "named", {"a": (double(i, 4), 2)})),
    "object": (lambda m, h: h * m.config.w, lambda m, i: setattr(m.config, "w", double(i, 4))),
    "global": (lambda m, h: h * GLOBAL["w"], lambda m, i: GLOBAL.update(w=double(i, 4))),
}
CHANGED = {
    "length": (lambda m, h: sum(h * w for w in m.ws), lambda m, i: m.ws.append(double(i, 4))),
    "number": (lambda m, h: h * m.named["a"][0] * m.named["a"][1], lambda m, i: m.named.update(a=(double(3, 4), i))),
    "keys": (lambda m, h: h * m.named["a"][0] * len(m.named), lambda m, i: m.named.update({i: 0})),
    "none": (lambda m, h: h if m.ws[0] is None else h * m.ws[0], lambda m, i: m.ws.__setitem__(0, None)),
    "class": (lambda m, h: h * m.ws[isinstance(m.ws, tuple)], lambda m, i: setattr(m, "ws", tuple(m.ws))),
    "same": (lambda m, h: h * m.ws[m.ws[0] is m.ws[1]], lambda m, i: m.ws.__setitem__(0, m.ws[1])),
    "asked": (lambda m, h: h * m.ws[0] * kinds(m), lambda m, i: m.ws.__setitem__(0, double(i, 8)[4:])),
    "tied": (lambda m, h: h * m.tied[0], lambda m, i: setattr(m.linear, "bias", nn.Parameter(double(i, 4)))),
    "second name": (lambda m, h: h * m.scale + m.again, lambda m, i: setattr(m, "again", double(i, 4))),
    "tied item": (lambda m, h: h * m.tied[0], lambda m, i: m.tied.__setitem__(0, nn.Parameter(double(i, 4)))),
}


@pytest.mark.parametrize("kind", [*ANEW, *CHANGED])
def test_tensors_in_containers_may_be_others_and_what_is_around_them_may_not(kind):
    run, change = (ANEW | CHANGED)[kind]

    def step(module, own, i):
        change(module, 20 + i)
        y = module(double(10 + i, 3, 4))
        y.square().sum().backward()
        return y

    made = beside(lambda: (Contains(run), None), step, lambda m, own: (double(9, 3, 4),), hits=3 * (kind in ANEW))
    assert stats(made).hits == (3 if kind in ANEW else 0)


class Keeps(nn.Module):
    """Sets an attribute at each call, so that it is recorded from the state that a first run left."""

    def __init__(self, holder):
        super().__init__()
        self.raw, self.holder, self.kept = nn.Parameter(double(1, 4)), holder, None

    def prepare(self):
        made = self.raw * 2, self.raw.sin()
        holders = {"list": list(made), "tuple": made, "dict": dict(enumerate(made)), "object": SimpleNamespace(w=made)}
        self.held = holders[self.holder]

    def forward(self, x):
        a, b = self.held.w if self.holder == "object" else (self.held[0], self.held[1])
        y = x * a + b
        self.kept = y * 2
        return y


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
@pytest.mark.parametrize("holder", ["list", "tuple", "dict", "object"])
def test_a_module_that_keeps_state_has_the_gradient_of_computed_tensors(holder, on_miss):
    module, eager = Keeps(holder), Keeps(holder)
    module.prepare()
    add_tvm_dispatch(module, double(10, 3, 4), on_miss=on_miss)
    for i in range(3):
        for each in (module, eager):
            each.raw.grad = None
            each.prepare()
            (each(double(10 + i, 3, 4)).square().sum() + each.kept.sum()).backward()
        torch.testing.assert_close(module.raw.grad, eager.raw.grad, rtol=1e-12, atol=1e-12)
    assert stats(module).hits == 3 or holder == "object"  # another object may be a miss
