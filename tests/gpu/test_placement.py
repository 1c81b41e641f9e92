"""Where tensors lie: a module that is moved, arguments of two devices, a device that is not the current one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU, two_gpus

pytestmark = ON_A_GPU


class Scaled(nn.Module):
    """Draws, a product, a second argument."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale):
        return F.dropout(self.linear(x), 0.25).tanh() * scale


def made(x_on, scale_on="", shape=()):
    torch.manual_seed(0)
    x = torch.randn(12, 32, device="cpu").to(x_on).requires_grad_()
    return x, torch.full(shape, 1.5, device=scale_on or x_on)


def outcome(module, given) -> tuple[object, torch.Tensor]:
    """Results and gradients, or the error's words; the generator's state."""
    torch.manual_seed(3)
    x = given[0].detach().clone().requires_grad_()
    module.zero_grad()
    try:
        result = module(x, *given[1:])
        result.square().sum().backward()
    except RuntimeError as error:
        return str(error).partition("\n")[0], torch.cuda.get_rng_state()
    return [result.detach(), x.grad, *(each.grad.clone() for each in module.parameters())], torch.cuda.get_rng_state()


def assert_as_eager(module, eager, given):
    found, own = outcome(module, given)
    wanted, state = outcome(eager, given)
    assert torch.equal(own, state) and type(found) is type(wanted)
    if isinstance(wanted, str):
        assert found == wanted
        return
    for one, other in zip(found, wanted, strict=True):
        assert one.device == other.device
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
@pytest.mark.parametrize(("scale_on", "shape"), [("cpu", ()), ("cpu", (1,)), ("cpu", (12, 32)), ("cuda", ())])
@pytest.mark.parametrize("x_on", ["cuda", "cpu"])
def test_arguments_of_two_devices(x_on, scale_on, shape, on_miss):
    """Arguments that eager takes (a number in a tensor of the CPU's) run eager; others raise eager's error."""
    torch.manual_seed(0)
    eager = Scaled().to(DEVICE)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, made(DEVICE), on_miss=on_miss)
    for _ in range(2):
        assert_as_eager(module, eager, made(x_on, scale_on, shape))
    if (x_on, scale_on) == ("cuda", "cuda"):
        assert not stats(module).misses
    assert stats(module).hits + stats(module).misses.total() == 2
    hits = stats(module).hits
    assert_as_eager(module, eager, made(DEVICE))
    assert stats(module).hits == hits + 1


def test_a_sample_of_two_devices_is_refused_by_name():
    with pytest.raises(UnsupportedModule, match="tensors on cuda:0 and cpu"):
        add_tvm_dispatch(Scaled().to(DEVICE), made(DEVICE, "cpu", (12, 32)))


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "cpu()": lambda module: module.cpu(),
    "to('cpu')": lambda module: module.to("cpu"),
    "to('cuda:1')": lambda module: module.to("cuda:1"),
}


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
@pytest.mark.parametrize("move", [pytest.param(each, marks=[two_gpus] * ("1" in each)) for each in MOVES])
def test_a_module_that_is_moved_and_comes_back(move, on_miss):
    """It misses with a reason, or is compiled where it is now; back again, its first entry serves it."""
    torch.manual_seed(0)
    eager = Scaled().to(DEVICE)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, made(DEVICE), on_miss=on_miss)
    assert_as_eager(module, eager, made(DEVICE))
    for each in (module, eager):
        MOVES[move](each)
    there = next(eager.parameters()).device
    for _ in range(2):
        assert_as_eager(module, eager, made(there))
    counted = stats(module)
    if on_miss == "compile":
        assert counted.hits == 3 and {str(entry.options.backend.device) for entry in counted.entries} == {
            "cuda:0",
            str(there),
        }
    else:
        assert counted.hits == 1 and counted.misses.total() == 2
        assert all("device" in reason and str(there) in reason for reason in counted.misses), counted.misses
    for each in (module, eager):
        each.to(DEVICE)
    hits = counted.hits
    assert_as_eager(module, eager, made(DEVICE))
    assert stats(module).hits == hits + 1


def test_a_module_that_is_made_on_the_host_and_moved():
    """Dispatched before ``.cuda()``, as scripts do."""
    torch.manual_seed(0)
    eager = Scaled()
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, made("cpu"), on_miss="compile")
    eager.cuda(), module.cuda()
    for _ in range(2):
        assert_as_eager(module, eager, made(DEVICE))
    assert stats(module).hits == 2


@two_gpus
@pytest.mark.parametrize("current", [0, 1])
def test_a_module_on_the_second_device(current):
    """Forward and backward there, draws of its generator; whichever device is current, that one is afterwards."""
    torch.manual_seed(0)
    eager = Scaled().to("cuda:1")
    module = copy.deepcopy(eager)
    states = []
    with torch.cuda.device(current):
        add_tvm_dispatch(module, made("cuda:1"))
        for each in (module, eager):
            torch.manual_seed(0)
            given = made("cuda:1")
            torch.cuda.manual_seed_all(4)
            out = each(*given)
            out.square().sum().backward()
            assert torch.cuda.current_device() == current and out.device.index == 1
            states.append((torch.cuda.get_rng_state(0), torch.cuda.get_rng_state(1)))
            states[-1] += (out.detach(), given[0].grad, *(parameter.grad for parameter in each.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(states[0][:2], states[1][:2], strict=True))
        for one, other in zip(states[0][2:], states[1][2:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert stats(module).hits == 1 and not stats(module).misses


@two_gpus
def test_two_devices_by_turns():
    """One module, an entry for each device; nothing leaks from one to the other."""
    torch.manual_seed(0)
    eager = Scaled().to("cuda:0")
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, made("cuda:0"), on_miss="compile")
    for turn in range(6):
        there = f"cuda:{turn % 2}"
        for each in (module, eager):
            each.to(there)
        assert_as_eager(module, eager, made(there))
    assert stats(module).hits == 6 and len(stats(module).entries) == 2
    assert torch.cuda.current_device() == 0
