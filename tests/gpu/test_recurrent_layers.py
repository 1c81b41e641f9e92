"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` on a GPU as cuDNN's kernels: beside eager, recorded, gone through twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import check_module
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU

LAYERS = {
    "LSTM": lambda: nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True),
    "LSTM without biases": lambda: nn.LSTM(6, 8, bias=False),
    "GRU": lambda: nn.GRU(6, 8, 2),
    "RNN": lambda: nn.RNN(6, 8, nonlinearity="relu", bidirectional=True),
}


@pytest.fixture(autouse=True)
def of_cudnn(monkeypatch):
    monkeypatch.setattr("bridge.aten.recurrent.cudnn_is_quicker", lambda *_: True)


def called(module: nn.Module) -> list[str]:
    (entry,) = stats(module).entries
    return [step.name for part in (entry.forward, entry.backward) for step in part.steps if "recurrent" in step.name]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
def test_layers(name, graphs):
    make = lambda: torch.randn(5, 3, 6, requires_grad=True)  # noqa: E731
    module = check_module(LAYERS[name], make, calls=8 if graphs else 2, cuda_graphs=graphs)
    assert called(module) == ["recurrent_layers", "recurrent_layers_backward"]
    recorded = stats(module).graphs
    assert bool(recorded.replays) == graphs and not recorded.refused, recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_eagers_bits(dtype):
    torch.manual_seed(0)
    eager = LAYERS["LSTM"]().to("cuda", dtype)
    ours, x = copy.deepcopy(eager), torch.randn(5, 3, 6, device="cuda", dtype=dtype, requires_grad=True)
    add_tvm_dispatch(ours, x)
    assert torch.equal(ours(x)[0], eager(x)[0]) and stats(ours).hits == 1


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
def test_a_second_backward(graphs):
    """cuDNN's backward writes into the workspace of its forward."""
    torch.manual_seed(0)
    module, x = LAYERS["GRU"]().double().cuda(), torch.randn(5, 3, 6, device="cuda", dtype=torch.float64)
    add_tvm_dispatch(module, x, cuda_graphs=graphs)
    for _ in range(6):
        module.zero_grad()
        y = module(x)[0].square().sum()
        y.backward(retain_graph=True)
        once = [each.grad.clone() for each in module.parameters()]
        y.backward()
        for grad, parameter in zip(once, module.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, 2 * grad, rtol=1e-12, atol=1e-14)
