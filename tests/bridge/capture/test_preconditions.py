"""Descriptions of structures, a class's own ``__call__``, TorchScript, arguments that are no constants."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run
from tests.bridge.models import MLP

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count)).requires_grad_()


class Pair(NamedTuple):
    left: torch.Tensor
    scale: float = 2.0


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, first, *more, **named):
        first = first["x"] if isinstance(first, dict) else first[0] if isinstance(first, tuple | list) else first
        return self.linear(first)


STRUCTURES = [
    (((rows(),), {}), ((rows(), 1.0), {}), "number of positional arguments: compiled for 1, called with 2"),
    (((rows(),), {}), ((rows(),), {"a": 1}), "keyword arguments: compiled for [], called with ['a']"),
    (
        (([rows()],), {}),
        (((rows(),),), {}),
        "structure of argument args[0]: compiled for list of 1, called with tuple of 1",
    ),
    (
        (({"x": rows(), "y": [rows(), 1]},), {}),
        (({"x": rows(), "y": [rows()]},), {}),
        "structure of argument args[0]['y']: compiled for list of 2, called with list of 1",
    ),
    (
        ((rows(),), {"a": {"b": 1}}),
        ((rows(),), {"a": {"c": 1}}),
        "structure of argument kwargs['a']: compiled for dict of ['b'], called with dict of ['c']",
    ),
    (
        ((rows(),), {"a": (1,)}),
        ((rows(),), {"a": 1}),
        "structure of argument kwargs['a']: compiled for tuple of 1, called",
    ),
    (
        ((Pair(rows()),), {}),
        ((Pair(rows(), 3.0),), {}),
        "value of argument args[0].scale: compiled for 2.0, called with 3.0",
    ),
    (
        ((Pair(rows()),), {}),
        (((rows(), 2.0),), {}),
        "structure of argument args[0]: compiled for Pair of 2, called with t",
    ),
]


@pytest.mark.parametrize(("sample", "call", "reason"), STRUCTURES, ids=range(len(STRUCTURES)))
def test_a_difference_of_structure_is_named_where_it_is(sample, call, reason):
    module = Takes()
    add_tvm_dispatch(module, sample[0], sample_kwargs=sample[1])
    module(*sample[0], **sample[1])
    module(*call[0], **call[1])
    assert stats(module).hits == 1
    (found,) = stats(module).misses
    assert found.startswith(reason), found


def test_a_model_output_as_an_argument():
    """A decoder's argument from an encoder; its class has no key paths in torch's pytree, and drops its Nones."""

    class Decodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, encoded):
            return self.linear(encoded.last_hidden_state)

    module = Decodes()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, {"encoded": BaseModelOutput(last_hidden_state=rows())})
    call = Call(kwargs={"encoded": BaseModelOutput(last_hidden_state=rows())})
    assert_same(run(module, call), run(eager, call), **CLOSE)
    module(encoded=BaseModelOutput(last_hidden_state=rows(5)))
    assert stats(module).hits == 1
    (reason,) = stats(module).misses
    assert reason.startswith("shape of kwargs['encoded']['last_hidden_state']"), reason


@dataclass
class Options:
    scale: float = 1.0
    convert: object = len


@pytest.mark.parametrize("argument", [Options(), np.ones(2), len, slice(2), torch.Size([2]), nn.ReLU], ids=repr)
def test_an_argument_that_is_no_constant_is_named(argument):
    with pytest.raises(UnsupportedModule, match=rf"kwargs\['a'\]\[1\], a {type(argument).__name__}"):
        add_tvm_dispatch(Takes(), (rows(),), sample_kwargs={"a": [1, argument]})


def test_a_call_of_the_modules_own_class_goes_around_the_compiled_one():
    class Doubles(MLP):
        def __call__(self, x):
            return super().__call__(x) * 2

    torch.manual_seed(0)
    module = Doubles(dropout=0.5)
    eager = copy.deepcopy(module)
    written = Doubles.__call__
    add_tvm_dispatch(module, rows())
    assert Doubles.__call__ is written
    assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), **CLOSE)
    outer = nn.Sequential(module, nn.Tanh())
    add_tvm_dispatch(outer, rows())  # it is captured as a part of the outer module
    assert_same(run(outer, Call((rows(),))), run(nn.Sequential(eager, nn.Tanh()), Call((rows(),))), **CLOSE)
    assert stats(module).hits == stats(outer).hits == 1


@pytest.mark.composes("TorchScript modules", "refused by name", section="The module stays the user's")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda module: module, nn.Sequential], ids=["root", "inside"])
def test_torchscript_is_refused_by_name(wrap):
    with pytest.raises(UnsupportedModule, match=r"torch\.jit module"):
        add_tvm_dispatch(wrap(torch.jit.trace(nn.Tanh(), rows())), rows())


def test_tensors_on_several_devices_are_refused_by_name():
    module = nn.Linear(6, 6)
    module.register_buffer("scale", torch.ones(6, device="meta"))
    with pytest.raises(UnsupportedModule, match=f"tensors on {torch.zeros(1).device} and meta"):
        add_tvm_dispatch(module, rows())
    with pytest.raises(UnsupportedModule, match=r"device meta: compiled code runs on cpu and cuda"):
        add_tvm_dispatch(nn.Linear(6, 6, device="meta"), torch.ones(2, 6, device="meta"))
