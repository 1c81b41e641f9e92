"""Modules as places: reads by torch's own code, without a mention in forward's, are watched as well."""

from collections import UserDict

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Function


class Holds(nn.Module):
    """Calls a module outside of its tree."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.hidden = [nn.Sequential(nn.Tanh(), nn.Dropout(0.0))]

    def forward(self, x):
        return self.hidden[0](x * self.weight)


def doubled(module, args, result):
    return result * 2


OUTSIDE = {
    "hook": lambda hidden: hidden.register_forward_hook(doubled),
    "hook inside": lambda hidden: hidden[0].register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "class": lambda hidden: setattr(hidden[0], "__class__", nn.Sigmoid),
    "child": lambda hidden: hidden.append(nn.ReLU()),
    "order of children": lambda hidden: hidden._modules.update({"0": hidden[1], "1": nn.ReLU()}),
}


@pytest.mark.parametrize("name", list(OUTSIDE))
def test_a_module_outside_of_the_tree_is_watched(name):
    module, x = Holds(), torch.randn(3)
    add_tvm_dispatch(module, x)
    module(x)
    OUTSIDE[name](module.hidden[0])
    expected = module.forward(x)
    for _ in range(2):
        assert torch.equal(module(x), expected)
    assert stats(module).hits == 1 and sum(stats(module).misses.values()) == 2
    assert "hidden" in next(iter(stats(module).misses))


class Walks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        for each in self.parameters():
            x = x * each + 1
        return x


class Names(Walks):
    def forward(self, x):
        return (x * self.first + 1) * self.second + 1


@pytest.mark.parametrize("kind", [Walks, Names])
def test_the_order_of_parameters_matters_where_forward_walks_through_them(kind):
    module, x = kind(), torch.randn(3)
    add_tvm_dispatch(module, x)
    module(x)
    module._parameters["first"] = module._parameters.pop("first")
    assert torch.equal(module(x), module.forward(x))
    expected = [] if kind is Names else ["order of the parameters of the module changed"]
    assert list(stats(module).misses) == expected


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.options, self.step = {"gain": 1.0}, 0

    def forward(self, x):
        self.step += 1
        return x * self.options["gain"]


def test_an_equal_dictionary_in_place_of_another_is_compared_again():
    module, x = Counts(), torch.randn(3)
    add_tvm_dispatch(module, x)
    module(x)
    module.options = {"gain": 1.0}
    for _ in range(3):
        assert torch.equal(module(x), x)
    assert stats(module).hits == 4
    module.options["gain"] = 2.0
    assert torch.equal(module(x), x * 2)
    assert list(stats(module).misses) == ["attribute 'options' of the module changed"]


def test_registries_in_place_of_others_are_followed():
    """As libraries that clone modules do: the same contents in another dictionary."""
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    add_tvm_dispatch(module, x)
    module(x)
    module[0].__dict__["_parameters"] = dict(module[0]._parameters)
    for _ in range(3):
        module(x)
    assert stats(module).hits == 4
    module[0]._parameters["weight"] = nn.Parameter(torch.ones(3, 3))
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 5
    module[0]._parameters["bias"] = None
    torch.testing.assert_close(module(x), module.forward(x))
    assert list(stats(module).misses) == ["parameter '0.bias': compiled for a tensor, called with None"]


def test_registries_of_another_class_are_compared_at_each_call():
    """Nothing counts the writes to them."""
    module, x = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Tanh()), torch.randn(2, 3)
    module[0].__dict__["_buffers"] = UserDict(module[0]._buffers)
    add_tvm_dispatch(module, x)
    for _ in range(3):
        module(x)
    assert stats(module).hits == 3
    module[0]._buffers["running_mean"] = torch.ones(3)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 4
    del module[0]._buffers["num_batches_tracked"]
    module(x)
    assert list(stats(module).misses) == ["number of buffers of submodule '0': compiled for 3, called with 2"]


class Compared:
    """An object that cannot be compared."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        raise ValueError("neither equal nor different")

    __hash__ = None


class ReadsCompared(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Compared(2.0)

    def forward(self, x):
        return x * self.options.scale


def test_attributes_are_not_compared_by_their_own_code():
    module, x = ReadsCompared(), torch.randn(3)
    add_tvm_dispatch(module, x)
    module.options = Compared(3.0)
    assert torch.equal(module(x), x * 3)
    assert list(stats(module).misses) == ["attribute 'options' of the module changed"]


class Made(nn.Module):
    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("makes", [False, True], ids=["made before", "forward makes one"])
def test_the_first_torch_compile_of_a_process_is_no_change(makes, monkeypatch):
    """It replaces ``nn.Module.__init__`` for good; a forward that makes modules follows what that sets."""
    plain = nn.Module.__init__

    def setting(factor):
        def init(self):
            plain(self)
            self.__dict__["factor"] = factor

        return init

    monkeypatch.setattr(nn.Module, "__init__", setting(2.0))
    module, x = Function((lambda x: Made()(x) + 1) if makes else lambda x: x.sin() + 1), torch.ones(3)
    add_tvm_dispatch(module, x)
    monkeypatch.setattr(nn.Module, "__init__", setting(3.0))
    assert torch.equal(module(x), x * 3 + 1 if makes else x.sin() + 1)
    assert stats(module).hits == (not makes)
