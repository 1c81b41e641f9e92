"""Loops on a GPU: recurrent networks beside eager, launched step by step and recorded, with parts at any address."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from benchmarks.lstm import LayerNormLSTM
from benchmarks.recurrent_cells import GRU, LSTM, SelectiveScan
from bridge import add_tvm_dispatch, stats
from bridge.compile import RunLoop
from tests.bridge.compare import check_module
from tests.bridge.parity.test_precision import assert_close_enough, step
from tests.gpu.marks import ON_A_GPU
from tests.gpu.precision import float32_products
from tests.recurrent_grid import Dropping

pytestmark = ON_A_GPU

NETWORKS = {"LSTM": LSTM, "LayerNorm-LSTM": LayerNormLSTM, "GRU": GRU, "selective scan": SelectiveScan}


def checked(name, shape, **options):
    module = check_module(lambda: NETWORKS[name](shape[-1]), lambda: torch.randn(shape, requires_grad=True), **options)
    (entry,) = stats(module).entries
    lengths = [
        step.length for part in (entry.forward, entry.backward) for step in part.steps if isinstance(step, RunLoop)
    ]
    return module, lengths


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("steps", [1, 2, 7, 64])
def test_networks_of_any_length(name, steps):
    _, lengths = checked(name, (2, steps, 8))
    assert lengths == ([steps, steps] if steps > 2 else [])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_parts_that_do_not_begin_where_vectors_do(name, dtype):
    """Steps of 45, 60 or 120 bytes and the like: a kernel that reads vectors there would be an error of the GPU."""
    checked(name, (3, 7, 5), dtype=dtype)


@pytest.mark.parametrize("name", NETWORKS)
def test_loops_are_recorded(name):
    module, _ = checked(name, (4, 7, 8), cuda_graphs=True, calls=8)
    graphs = stats(module).graphs
    assert graphs.replays and not graphs.refused, graphs


@pytest.mark.parametrize("name", NETWORKS)
def test_products_in_tf32(name):
    """Results and gradients are as near to float64 as eager's in TF32: steps round alike, whatever leaves the loop."""
    with float32_products("high"):
        checked(name, (16, 20, 128), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("width", [8, 5])
def test_dropout_in_the_step(monkeypatch, dtype, width):
    """Eager's masks, for an operand at any address: the address decides which element gets which number."""
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)
    module = check_module(lambda: Dropping(width), lambda: torch.randn(3, 9, width, requires_grad=True), dtype=dtype)
    (entry,) = stats(module).entries
    assert entry.lowered.captured.loop.is_recorded and len(entry.lowered.captured.draws) == 1


LAYERS = {kind.__name__: kind for kind in (nn.LSTM, nn.GRU, nn.RNN)}


@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_layers_in_half_types(kind, dtype, monkeypatch):
    monkeypatch.setattr("bridge.aten.recurrent.cudnn_is_quicker", lambda *_: False)
    make = lambda: kind(8, 8, 2, batch_first=True, bidirectional=True)  # noqa: E731
    module = check_module(make, lambda: torch.randn(3, 20, 8, requires_grad=True), dtype=dtype)
    assert stats(module).entries[0].has_loops


@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("setting", [torch.float16, torch.bfloat16], ids=str)
def test_layers_under_autocast(kind, setting):
    """cuDNN's are cast to float16, whatever else is cast to."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = kind(8, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.layers(x)[0])

    torch.manual_seed(0)
    eager, x = Layers(), torch.randn(3, 20, 8, requires_grad=True)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    with torch.autocast("cuda", setting):
        add_tvm_dispatch(ours, x)
    found = [step(each, x, torch.autocast("cuda", setting)) for each in (ours, eager)]
    assert_close_enough(*found, step(exact, x.double(), nullcontext()))
    assert stats(ours).hits == 1
