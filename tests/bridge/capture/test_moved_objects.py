"""Generators that are not torch's, and iterators: refused where forward moves them, and where they were in any case."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, stats


def counting():
    for number in itertools.count():
        yield float(number)


def draw(held):
    return held.random() if hasattr(held, "random") else held.standard_normal()


def following(held):
    found = next(held)
    return found[0] if isinstance(found, tuple) else found


MAKE = {
    "random.Random": (lambda: random.Random(3), draw),
    "default_rng": (lambda: np.random.default_rng(3), draw),
    "torch.Generator": (lambda: torch.Generator().manual_seed(3), lambda held: torch.rand((), generator=held)),
    "RandomState": (lambda: np.random.RandomState(3), draw),
    "count": (itertools.count, following),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 5.0]), following),
    "list": (lambda: iter([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), following),
    "zip": (lambda: zip(itertools.count(), "abcdefgh", strict=False), following),
    "generator function": (counting, following),
}
HELD: list = []
IN_A_GLOBAL = None


class Net(nn.Module):
    def __init__(self, held, where, moves, used):
        super().__init__()
        self.linear, self.where, self.moves, self.used = nn.Linear(4, 4), where, moves, used
        self.held = {"attribute": held, "list": [held]}.get(where)

    def forward(self, x):
        held = IN_A_GLOBAL if self.where == "global" else self.held[0] if self.where == "list" else self.held
        number = self.moves(held) if self.moves is not None else 1.0
        return self.linear(x) * (number if self.used else 2.0)


def outcomes(make, where, moves, used, x, add):
    """The results of three calls of a module that is refused when it is added."""
    global IN_A_GLOBAL
    torch.manual_seed(0)
    held = make()
    IN_A_GLOBAL = held
    module = Net(held, where, moves, used)
    if add is not None:
        add(module)
    return [module(x) for _ in range(3)], module


def refused(module, x, sample):
    if not sample:
        add_tvm_dispatch(module)
        return
    if sample == "parts":
        with suppress(UnsupportedModule):
            add_tvm_dispatch(module, x, whole=False)
        return
    examine(module, x)
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(module, x, whole=True)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("sample", [True, False, "parts"])
@pytest.mark.parametrize("where", ["attribute", "list", "global"])
@pytest.mark.parametrize("kind", MAKE)
def test_what_forward_moves_is_refused_and_not_moved(kind, where, sample, used):
    make, moves = MAKE[kind]
    x = torch.randn(3, 4)
    wanted, _ = outcomes(make, where, moves, used, x, None)
    got, module = outcomes(make, where, moves, used, x, lambda module: refused(module, x, sample))
    assert all(map(torch.equal if sample != "parts" else torch.allclose, got, wanted))
    if not sample:
        found = stats(module)  # of the module itself; modules inside may be dispatched
        assert getattr(found, "parts", None) or sum(found.misses.values()) == 3


@pytest.mark.parametrize("where", ["attribute", "list", "global"])
@pytest.mark.parametrize("kind", MAKE)
def test_what_it_leaves_alone_is_no_concern(kind, where):
    make, _ = MAKE[kind]
    x = torch.randn(3, 4)
    wanted, _ = outcomes(make, where, None, True, x, None)
    got, module = outcomes(make, where, None, True, x, lambda module: add_tvm_dispatch(module, x))
    assert stats(module).hits == 3
    torch.testing.assert_close(got, wanted)


@torch.library.custom_op("moved_objects::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


noise.register_fake(torch.empty_like)
LIBRARY = torch.library.Library("moved_objects_too", "DEF")
LIBRARY.define("jitter(Tensor x) -> Tensor")
LIBRARY.impl("jitter", lambda x: x + torch.randn(x.shape), "CPU")
LIBRARY.impl("jitter", torch.empty_like, "Meta")


class Noisy(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.linear, self.operator = nn.Linear(4, 4), operator

    def forward(self, x):
        return self.linear(x) * self.operator(x)


@pytest.mark.cpu("one of the operators has no kernel elsewhere")
@pytest.mark.parametrize("way", ["sample", "no sample", "parts", "torch.compile"])
@pytest.mark.parametrize("operator", [noise, torch.ops.moved_objects_too.jitter], ids=["custom_op", "library"])
def test_an_operator_that_draws_without_saying_so_draws_as_in_eager(operator, way):
    module, x = Noisy(operator), torch.randn(3, 4)
    torch.manual_seed(5)
    wanted = [module(x) for _ in range(2)]
    torch.manual_seed(5)
    called = module
    if way == "no sample":
        add_tvm_dispatch(module)
    elif way == "sample":
        with pytest.raises(UnsupportedModule, match="draws random numbers"):
            add_tvm_dispatch(module, x)
    elif way == "parts":
        add_tvm_dispatch(module, x, whole=False)
    else:
        torch.compiler.reset()
        called = torch.compile(module, backend="tvm_dispatch")
    torch.testing.assert_close([called(x) for _ in range(2)], wanted)


class Freeing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        y = x * w
        x.untyped_storage().resize_(0)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def freed(net, x):
    y = net.linear(x)
    x.untyped_storage().resize_(0)
    return y


def grown(net, x):
    x.untyped_storage().resize_(4096)
    return net.linear(x)


def freed_inside(net, x):
    h = net.linear(x)
    y = h + 1
    h.untyped_storage().resize_(0)
    return y


def freed_parameter(net, x):
    y = net.linear(x)
    net.linear.bias.data.untyped_storage().resize_(0)
    return y


class Memory(nn.Module):
    def __init__(self, moves):
        super().__init__()
        self.linear, self.moves = nn.Linear(4, 4), moves

    def forward(self, x):
        return self.moves(self, x)


FREES = {
    "in a Function": lambda net, x: Freeing.apply(x, net.linear.weight[0]),
    "what a Function is given": lambda net, x: Freeing.apply(net.linear(x), net.linear.weight[0]),
    **{each.__name__: each for each in (freed, grown, freed_inside, freed_parameter)},
}


@pytest.mark.parametrize("way", ["sample", "examine", "parts"])
@pytest.mark.parametrize("kind", FREES)
def test_memory_that_forward_frees_or_grows_is_as_it_was(kind, way):
    net, x = Memory(FREES[kind]), torch.randn(3, 4)
    tensors = [x, *net.parameters()]
    before = [each.clone() for each in tensors]
    told = ""
    try:
        if way == "examine":
            told = str(examine(net, x))
        elif way == "sample" or kind != "freed_parameter":  # which eager's second call does not survive
            add_tvm_dispatch(net, x, whole=way == "sample")
    except UnsupportedModule as error:
        told = str(error)
    assert way == "parts" or "untyped_storage().resize_(): frees or grows a tensor's memory" in told
    for each, then in zip(tensors, before, strict=True):
        assert each.untyped_storage().nbytes() == then.untyped_storage().nbytes()
        assert torch.equal(each, then)
