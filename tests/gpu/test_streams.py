"""A dispatched module on streams: made on one, called on another, used on a third; copies without a wait."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU

LONG = 20_000_000
"""Cycles that a stream is busy before the tested work: work that does not wait for it is early."""


class Block(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture
def pair():
    """The module dispatched, the same eager, a sample; both ran once."""
    torch.manual_seed(0)
    eager, x = Block().to(DEVICE), torch.randn(48, 64, device=DEVICE)
    module = copy.deepcopy(eager)
    for sample in (x, x.clone().requires_grad_()):
        add_tvm_dispatch(module, sample)
    for each in (eager, module):
        each(x).sum().backward()
        each.zero_grad()
    torch.cuda.synchronize()
    return module, eager, x


def gradients(module, x):
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def close(made, wanted):
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, other.abs().max().item()))


def test_made_called_and_used_on_three_streams(pair):
    """Inputs of one stream, forward on another, the backward from the default one: it runs where forward did."""
    module, eager, x = pair
    source, first, second = torch.zeros_like(x), torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(4):
        module.zero_grad()
        eager.zero_grad()
        wanted_input = (x * turn).requires_grad_()
        wanted = eager(wanted_input)
        wanted.square().sum().backward()
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(LONG)
            source.copy_(x).mul_(turn)
            given = source.clone().requires_grad_()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            made = module(given)
            torch.cuda._sleep(LONG)
            loss = made.square().sum()
        given.record_stream(second)
        torch.cuda.current_stream().wait_stream(second)
        loss.backward()
        torch.cuda.current_stream().wait_stream(second)
        torch.cuda.current_stream().wait_stream(first)
        close([made.detach(), *gradients(module, given)], [wanted.detach(), *gradients(eager, wanted_input)])
    assert not stats(module).misses


def test_the_backward_runs_on_the_stream_of_its_forward(pair):
    """With the default stream busy for long, all of the backward is done before it is idle again."""
    module, _, x = pair
    side, gate = torch.cuda.Stream(), torch.cuda.Event()
    given = x.clone().requires_grad_()
    torch.cuda.synchronize()
    seen = []
    with torch.cuda.stream(side):
        for _ in range(2):
            made = module(given)
            made.register_hook(lambda grad: seen.append(torch.cuda.current_stream()))
            given.register_hook(lambda grad: seen.append(torch.cuda.current_stream()))
            made.sum().backward()
    gate.record(side)
    gate.synchronize()
    assert seen and all(stream == side for stream in seen)
    torch.testing.assert_close(given.grad, gradient_of(module, x) * 2)


def gradient_of(module, x):
    given = x.clone().requires_grad_()
    return torch.autograd.grad(module(given).sum(), given)[0]


def test_threads_with_streams_of_their_own(pair):
    """Each trains on its own stream at the same time; results equal serial runs'."""
    import threading

    module, _, x = pair
    inputs = [x * factor for factor in (1, 2, 3)]
    wanted = [gradient_of(module, each) for each in inputs]
    torch.cuda.synchronize()
    found, errors = {}, []

    def work(place):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    found[place] = gradient_of(module, inputs[place])
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(found[place], each) for place, each in enumerate(wanted))


def test_copies_that_do_not_block(pair):
    """Batches from pinned memory and results into it, as a loop with a prefetcher does."""
    module, eager, x = pair
    loader = torch.cuda.Stream()
    hosts = [torch.randn(48, 64, device="cpu").pin_memory() for _ in range(6)]
    results = [torch.empty(48, 64, device="cpu", pin_memory=True) for _ in hosts]
    with torch.no_grad():
        add_tvm_dispatch(module, x)
        for host, result in zip(hosts, results, strict=True):
            with torch.cuda.stream(loader):
                torch.cuda._sleep(LONG // 10)
                batch = host.to(DEVICE, non_blocking=True)
            torch.cuda.current_stream().wait_stream(loader)
            batch.record_stream(torch.cuda.current_stream())
            result.copy_(module(batch), non_blocking=True)
            del batch
        torch.cuda.synchronize()
        for host, result in zip(hosts, results, strict=True):
            torch.testing.assert_close(result, eager(host.to(DEVICE)).cpu(), rtol=1e-5, atol=1e-5)
    assert not stats(module).misses
