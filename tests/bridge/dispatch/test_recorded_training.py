"""Training with recorded graphs: optimizers of all kinds, also in the backward, offload, long runs.

LONG_RUN=2000 TEST_DEVICE=cuda python -m pytest tests/bridge/dispatch/test_recorded_training.py -k long_run
"""

from __future__ import annotations

import os

import pytest
import torch

from bridge import stats
from tests.bridge.dispatch.long_run import LongRun
from tests.bridge.dispatch.recorded_loops import plain
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("recorder_on_the_host")

STEPS = int(os.environ.get("LONG_RUN", 400 if DEVICE.type == "cuda" else 80))


OPTIMIZERS = {
    "SGD, foreach": lambda given: torch.optim.SGD(given, 1e-3, momentum=0.9, foreach=True),
    "AdamW, foreach": lambda given: torch.optim.AdamW(given, 1e-3, foreach=True),
    "AdamW, fused": lambda given: torch.optim.AdamW(given, 1e-3, fused=True),
    "Adam, one by one": lambda given: torch.optim.Adam(given, 1e-3, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(pair, name):
    """Optimizers change parameters in place, so the same recordings serve."""
    pair.optimizers = [OPTIMIZERS[name](each.parameters()) for each in pair.both]
    for seed in range(18):
        pair.step(seed, plain)
    replays = pair.graphs.replays
    for seed in range(4):
        pair.step(seed, plain)
    assert pair.graphs.replays >= replays + 6 and not pair.graphs.refused, pair.graphs


def test_an_optimizer_in_the_backward(pair):
    """Each parameter is updated as soon as its gradient is there, and the gradient's memory is free at once."""
    each = {one: torch.optim.SGD([one], 1e-3) for module in pair.both for one in module.parameters()}

    def step(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in each]

    def work(pair, module, optimizer):
        x = pair.batch(0)
        y = module(x)
        y.square().sum().backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        return [y.detach(), x.grad]

    for seed in range(18):
        pair.step(seed, work)
    replays = pair.graphs.replays
    for seed in range(4):
        pair.step(seed, work)
    for handle in handles:
        handle.remove()
    assert pair.graphs.replays >= replays + 6 and not pair.graphs.refused, pair.graphs


def _offload_on_a_side_stream():
    """As libraries of activation offload do it: copies on a stream of their own, tensors marked as used there."""
    side = torch.cuda.Stream()

    def pack(tensor):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            there.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        return there

    def unpack(there):
        torch.cuda.current_stream().wait_stream(side)
        return there.to(DEVICE, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


OFFLOADS = {
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=DEVICE.type == "cuda"),
    "a side stream": _offload_on_a_side_stream,
}


@pytest.mark.parametrize("how", OFFLOADS)
def test_activation_offload(pair, how):
    """Saved tensors are elsewhere between forward and backward; none is overwritten before it is copied."""
    if how != "save_on_cpu" and DEVICE.type != "cuda":
        pytest.skip("streams are a GPU's")

    def work(pair, module, optimizer):
        optimizer.zero_grad()
        x, again = pair.batch(0), pair.batch(1)
        with OFFLOADS[how]():
            y, other = module(x), module(again)
        (y.square().sum() + other.square().sum()).backward()
        optimizer.step()
        return [y.detach(), other.detach(), x.grad, again.grad]

    for seed in range(40):
        pair.step(seed, work)
    replays = pair.graphs.replays
    for seed in range(6):
        pair.step(seed, work)
    assert pair.graphs.replays > replays and not stats(pair.ours).misses, pair.graphs


def test_a_long_run_of_everything():
    """Losses are eager's, memory is flat, and every run that is no replay is counted with its reason."""
    run = LongRun()
    held = []
    for _ in range(4):
        run.steps(STEPS // 4)
        held.append(run.held_bytes())
    run.check()
    graphs = run.graphs
    assert graphs.replays + sum(graphs.ungraphed.values()) == run.program_runs, (graphs, run.program_runs)
    assert not graphs.refused and not stats(run.ours.module).misses, stats(run.ours.module)
    assert held[3] <= held[1] * 1.02 + (1 << 16), held
    assert graphs.replays > 0.5 * run.program_runs, graphs
