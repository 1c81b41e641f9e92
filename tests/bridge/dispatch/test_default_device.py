"""``torch.set_default_device`` and ``with torch.device(...)`` around adding a dispatch and around calls."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, examine, lower, stats
from bridge.base.devices import default_device_of_forward, function_modes
from bridge.base.torch_internals import len_function_stack
from tests.device import DEVICE, generators, set_generators

pytestmark = pytest.mark.cpu("on a GPU, factories of tests are given the device: see tests/gpu/test_default_device.py")

META = torch.device("meta")


class Factories(nn.Module):
    """Tensors that forward makes without saying where."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = F.dropout(self.linear(x), 0.3) * torch.arange(4) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x * torch.rand(4) + torch.zeros(3, 4).fill_(0.5)


class OnItsDevice(nn.Module):
    """Tensors that are made on a named device."""

    def forward(self, x):
        with torch.device(x.device):
            inside = torch.ones(4)
        return x * inside + torch.arange(4, device=x.device)


@contextlib.contextmanager
def set_default(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def nested(device):
    with set_default(META), torch.device(device):
        yield


WAYS = {"with torch.device": torch.device, "set_default_device": set_default, "one inside the other": nested}


def as_eager(module, x):
    """Two calls beside eager: numbers, gradients, generators."""
    for seed in range(2):
        found = []
        for call in (module, module.forward):
            torch.manual_seed(seed)
            given = x.detach().clone().requires_grad_()
            made = call(given)
            made.square().sum().backward()
            found.append((made.detach(), given.grad, generators()))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.composes(
    "`torch.set_default_device`, `with torch.device(...)`",
    "compiled with the tensors that forward makes there; under another default, eager, with a reason that names it",
    section="Guards",
)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_added_and_called_under_its_own_device(way):
    torch.manual_seed(0)
    with WAYS[way](DEVICE):
        module, x = Factories(), torch.randn(3, 4, requires_grad=True)
        assert module.linear.weight.device.type == DEVICE.type
        before, depth = generators(), len_function_stack()
        add_tvm_dispatch(module, x)
        assert torch.equal(generators(), before) and len_function_stack() == depth
        as_eager(module, x)
        assert stats(module).hits == 2 and not stats(module).misses
        assert examine(module, x).percentage == 100.0 and lower(module, x).backward is not None
    assert len_function_stack() == 0


def test_what_is_looked_at_under_a_default_device():
    """The check's own tensors are on the module's device."""
    module, x = OnItsDevice(), torch.randn(3, 4, requires_grad=True)
    with torch.device(META):
        lowered = lower(module, x)
        assert lowered.check().ok


def test_another_default_device_is_a_miss_with_a_reason():
    """Where factories make tensors on a wrong device, eager raises; a forward without factories only misses."""
    module, x = OnItsDevice(), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    with torch.device(META):
        torch.testing.assert_close(module(x), module.forward(x))
    (reason,) = stats(module).misses
    assert reason == "torch function mode: compiled for False, called with default device meta"
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 1


def test_a_dispatch_is_added_under_a_device_that_forward_does_not_use():
    """The package's own tensors lie on the module's device; without that default device the call is a miss."""
    module, x = OnItsDevice(), torch.randn(3, 4, requires_grad=True)
    with torch.device(META):
        add_tvm_dispatch(module, x)
        as_eager(module, x)
        assert stats(module).hits == 2 and not stats(module).misses
    module(x)
    assert stats(module).hits == 2 and stats(module).misses.total() == 1


class Looks(nn.Module):
    """Draws, then branches on a number of the program: a call of the other branch runs eager, its draws taken back."""

    def forward(self, x):
        y = F.dropout(x, 0.5) + torch.rand(4, device=x.device)
        return y * 2 if (x > 0).all() else y


def test_draws_are_taken_back_under_a_default_device():
    module, x = Looks(), torch.full((3, 4), 1.0)
    with torch.device(META):
        add_tvm_dispatch(module, x)
        for given in (x, -x):
            found = []
            for call in (module, module.forward):
                torch.manual_seed(0)
                found.append((call(given), generators()))
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert stats(module).hits == 1 and stats(module).misses.total() == 1


def test_what_eager_refuses_under_a_default_device_it_refuses():
    module, x = Factories().to(DEVICE), torch.randn(3, 4, device=DEVICE)
    with torch.device(META), pytest.raises((RuntimeError, UnsupportedModule)):
        add_tvm_dispatch(module, x)
    assert len_function_stack() == 0


def test_the_mode_sees_who_calls():
    """The default device holds for factories called in this file, not by the package or a tracer."""
    state = generators()
    with torch.device(META):
        given = torch.overrides._get_current_function_mode_stack()
        with default_device_of_forward():
            assert torch.ones(2).is_meta and function_modes() == META
            with torch.device("cpu"):
                assert not torch.ones(2).is_meta and function_modes() == 0
            assert torch.ones(2).is_meta and not torch.ones(2, device="cpu").is_meta
            made = torch.fx.Tracer().trace(nn.Linear(2, 2, device="cpu"))
            assert made is not None
        assert torch.overrides._get_current_function_mode_stack() == given
    assert function_modes() == 0
    set_generators(state)


class Asks(nn.Module):
    """Raises where a factory does not follow the default device."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        if self.make().device.type != "meta":
            raise RuntimeError("the default device is lost")
        return x * 2


FACTORIES = (partial(torch.empty, 2), partial(torch.arange, 8), partial(torch.tensor, [1.0]), partial(torch.rand, 3))


@pytest.mark.parametrize("make", FACTORIES, ids=lambda make: make.func.__name__)
def test_factories_follow_the_default_device_in_a_recorded_run(make):
    with META, contextlib.suppress(UnsupportedModule):  # no tensor of a program is on the device meta
        add_tvm_dispatch(Asks(make), torch.randn(3, device="cpu"))
