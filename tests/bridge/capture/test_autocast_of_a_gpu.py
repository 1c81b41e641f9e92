"""What a GPU's autocast does to operators, asked of fake tensors: without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from bridge.base.devices import working_for
from bridge.base.torch_internals import FakeTensorMode, aten
from bridge.capture.passes.autocast import AutocastState, spell_out_casts

WIDENED = {
    "sum": (aten.sum.default, ()),
    "sum of rows": (aten.sum.dim_IntList, ([1], True)),
    "prod": (aten.prod.dim_int, (1,)),
    "cumsum": (aten.cumsum.default, (1,)),
    "softmax": (aten.softmax.int, (1,)),
    "vector_norm": (aten.linalg_vector_norm.default, (2, [1])),
    "matrix_norm": (aten.linalg_matrix_norm.str_ord, ("fro",)),
    "norm": (aten.norm.Scalar, (2,)),
    "norm of rows": (aten.norm.ScalarOpt_dim, (2, [1])),
}


@pytest.fixture
def gpu(monkeypatch):
    """Autocast for a GPU, whether or not there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    with working_for(torch.device("cuda", 0)):
        yield FakeTensorMode()


def graph_of(mode, target, args, dtype):
    """A graph of one operator of one tensor, as it was traced under autocast, and its node."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, *args))
    node.meta["autocast"] = AutocastState(torch.bfloat16)
    graph.output(node)
    with mode, torch.autocast("cuda", torch.bfloat16):
        x.meta["val"] = torch.empty(4, 4, dtype=dtype, device="cuda")
        node.meta["val"] = target(x.meta["val"], *args)
    return fx.GraphModule(torch.nn.Module(), graph), node


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WIDENED)
def test_results_are_asked_for_in_float32(name, dtype, gpu):
    target, args = WIDENED[name]
    module, node = graph_of(gpu, target, args, dtype)
    assert spell_out_casts(module.graph, lambda _: False) == []
    assert node.target.overloadpacket is target.overloadpacket
    assert node.kwargs.get("dtype", dtype) is torch.float32
    torch.manual_seed(0)
    x = torch.randn(4, 4).to(dtype)
    module.recompile()
    torch.testing.assert_close(module(x), target(x.float(), *args))


def test_doubles_are_left_alone(gpu):
    module, node = graph_of(gpu, aten.sum.default, (), torch.float64)
    assert spell_out_casts(module.graph, lambda _: False) == []
    assert node.kwargs == {} and node.target is aten.sum.default
