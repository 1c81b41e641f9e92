"""Modules and inputs in channels_last: read in place, gradients in eager's layout, and eager's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.compile.schedule import horizontal_fusion
from bridge.dispatch import backward_nodes
from tests.device import DEVICE
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("lowered_once")

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
ON_THE_HOST = pytest.mark.skipif(DEVICE.type != "cpu", reason="inputs of a recorded run are looked at elsewhere")


class Body(nn.Module):
    """Convolutions, a weight that elementwise code reads, and a weight that is a result."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.randn(1, 3, 3, 3))

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x))) + x.flip(1)
        decay = (self.first.weight * self.scale).sum((1, 2, 3))
        return self.second(h), decay, self.first.weight, x.mean(1)


class Pooled(nn.Module):
    """A result and a gradient that torch's kernels make; the pool's input lies in another order than its result."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, bias=False)

    def forward(self, x):
        pooled = nn.functional.max_pool2d(torch.cat([x, x.tanh()], 1), 2)
        return self.first(x), pooled, nn.functional.max_pool2d(torch.relu(self.first(x)), 2)


def three_dimensional():
    return nn.Sequential(nn.Conv3d(2, 4, 2), nn.GELU(), nn.Conv3d(4, 2, 3, padding=1))


CASES = {
    "two dimensions": (Body, (4, 3, 12, 10), LAST),
    "equal extents": (Body, (3, 3, 3, 3), LAST),
    "pools": (Pooled, (2, 3, 8, 9), LAST),
    "three dimensions": (three_dimensional, (2, 2, 5, 4, 6), LAST_3D),
}


def pair(name, like=None, **options):
    make, shape, order = CASES[name]
    torch.manual_seed(0)
    eager = make().double().to(DEVICE).to(memory_format=order)
    x = torch.randn(shape, dtype=torch.float64, device=DEVICE).contiguous(memory_format=like or order)
    ours = add_tvm_dispatch(copy.deepcopy(eager), x.requires_grad_(), **options)
    return ours, eager, x


def step(module, x):
    """Results, gradients with their strides, the module's buffers."""
    module.zero_grad()
    x.grad = None
    y = module(x)
    results = y if isinstance(y, tuple) else (y,)
    loss = sum(each.square().sum() for each in results)
    if loss.requires_grad:
        loss.backward()
    grads = [x.grad, *(each.grad for each in module.parameters())]
    return [*results, *grads, *module.buffers()], list(map(lies, (*results, *grads)))


def lies(tensor):
    """Strides, where they show."""
    return (
        tensor
        if tensor is None
        else [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
    )


def agree(ours, eager, x):
    (found, lies), (wanted, lie) = step(ours, x), step(eager, x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert lies == lie


@pytest.mark.parametrize("name", sampled(CASES, lambda name: name != "three dimensions"))
def test_numbers_and_strides_are_eagers(name):
    ours, eager, x = pair(name)
    for _ in range(3):
        agree(ours, eager, x)
    assert not stats(ours).misses


def entry_of(ours):
    (entry,) = stats(ours).entries
    return entry


def test_programs_read_tensors_in_their_order():
    ours, _, _ = pair("two dimensions")
    for program in (entry_of(ours).forward, entry_of(ours).backward):
        lying = [param for param in program.layout.params if len(param.shape) == 4 and param.order is not None]
        assert len(lying) >= 3 and all(param.order == (0, 2, 3, 1) for param in lying)


@ON_THE_HOST
def test_nothing_is_copied_on_the_way_in():
    ours, _, x = pair("two dimensions")
    executor = type(entry_of(ours).forward.executor)
    given = {each.data_ptr() for each in (*ours.parameters(), x) if each.ndim == 4}
    seen = []
    load = executor._load

    def spied(self, registers, inputs):
        load(self, registers, inputs)
        seen.extend(each.data_ptr() for each in registers[: len(inputs)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_load", spied)
        ours(x)
    assert given <= set(seen)


def test_gradients_are_not_copied_on_the_way_out():
    """Autograd keeps a gradient in its tensor's memory layout, and copies any other."""
    ours, _, x = pair("two dimensions")
    made = {}
    for name, each in [*ours.named_parameters(), ("x", x)]:
        each.register_hook(lambda grad, name=name: made.update({name: grad.data_ptr()}))
    sum(each.square().sum() for each in ours(x)).backward()
    grads = {name: each.grad.data_ptr() for name, each in [*ours.named_parameters(), ("x", x)] if each.grad.ndim == 4}
    assert len(grads) == 4 and grads.items() <= made.items()


def test_of_another_layout_it_is_read_as_well():
    """A module in another memory format than when added, and an input that was dense in the sample."""
    ours, eager, x = pair("two dimensions")
    for order in (torch.contiguous_format, LAST):
        for module in (ours, eager):
            module.to(memory_format=order)
        agree(ours, eager, x)
    ours, eager, x = pair("two dimensions", like=torch.contiguous_format)
    agree(ours, eager, x)


def test_evaluation_and_second_derivatives():
    ours, eager, x = pair("two dimensions")
    found = []
    for module in (ours, eager):
        y, decay, *_ = module(x)
        (first,) = torch.autograd.grad(y.square().sum() + decay.sum(), x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), [x, module.second.weight])])
        module.eval()
        with torch.no_grad():
            found[-1] += module(x)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_in_several_autograd_nodes(monkeypatch):
    monkeypatch.setattr(backward_nodes, "GRADIENTS_OF_NODE", 3)
    monkeypatch.setattr(backward_nodes, "LEAST_BYTES", 512)
    # float64 on a GPU: gradients are copied into the order of the weights
    monkeypatch.setattr(horizontal_fusion, "_REACH", 8)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    eager = nn.Sequential(*layers).double().to(DEVICE).to(memory_format=LAST)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64, device=DEVICE).contiguous(memory_format=LAST).requires_grad_()
    ours = add_tvm_dispatch(copy.deepcopy(eager), x)
    agree(ours, eager, x)
    (entry,) = stats(ours).entries
    assert len(entry.programs.nodes) > 1


@pytest.mark.usefixtures("recorder_on_the_host")
@pytest.mark.parametrize("name", sampled(CASES, lambda name: name != "equal extents"))
def test_recorded(name):
    ours, eager, x = pair(name, cuda_graphs=True)
    for _ in range(30):
        with torch.no_grad():
            x.normal_()
        agree(ours, eager, x)
    assert stats(ours).graphs.replays > 10, stats(ours).graphs
