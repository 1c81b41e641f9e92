"""Branches of recorded graphs: steps side by side on three streams give a chain's bits."""

from __future__ import annotations

import pytest
import torch

from bridge import add_tvm_dispatch, stats
from bridge.compile.cuda import recorder
from bridge.compile.cuda.side_streams import SideStreams
from tests.bridge.dispatch.recorded_loops import Pair, plain
from tests.device import DEVICE, moved
from tests.gpu.cases import LAYERS
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


def steps(name, dtype, count=16):
    """Results and gradients of several steps."""
    make, sample = LAYERS[name]
    torch.manual_seed(0)
    module, x = make().to(DEVICE).train(), moved(sample())
    leaf = x.detach().requires_grad_()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
        add_tvm_dispatch(module, leaf, cuda_graphs=True)
    found = []
    for step in range(count):
        torch.manual_seed(step)
        module.zero_grad()
        leaf.grad = None
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            y = module(leaf)
            y = y if isinstance(y, torch.Tensor) else y[0]
        y.float().square().sum().backward()
        found += [y.detach(), leaf.grad.clone(), *(parameter.grad.clone() for parameter in module.parameters())]
    graphs = stats(module).graphs
    assert graphs.replays > count and not graphs.refused, graphs
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["BertLayer eager p=0.1 (3, 17)", "BertLayer sdpa p=0.1 (3, 17)"])
def test_bits_are_a_chains(name, dtype, monkeypatch):
    made = []
    monkeypatch.setattr(recorder, "SideStreams", lambda *args: made.append(args) or SideStreams(*args))
    found = []
    for streams in (1, 3):
        monkeypatch.setattr(recorder, "BRANCHES", streams)
        found.append(steps(name, dtype))
        assert bool(made) is (streams > 1), "no recording had branches"
    assert all(map(torch.equal, *found))


def test_what_cublas_works_in_stays_a_recordings():
    """torch.compile's reduce-overhead gives all of it back, and a graph of eager's ends the process where it lay in
    memory that nobody holds any more."""
    pair = Pair()
    for seed in range(12):
        pair.step(seed, plain)
    replays = pair.graphs.replays
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(8)]
    for seed in range(12):
        pair.step(seed, plain)
    assert pair.graphs.replays == replays + 24 and all(bool(each.isnan().all()) for each in others)
