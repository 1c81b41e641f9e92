"""Equal calls are decomposed once, and what that gives is what torch gives for the whole graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from bridge.capture import capture
from bridge.capture.dynamic_shapes import dynamic_dims
from bridge.capture.passes import decompose, kinds
from bridge.capture.passes.formulas import clear_formulas
from tests.sampling import sampled


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(count)))


class Steps(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.cell, self.count = nn.GRUCell(8, 8), count

    def forward(self, x):
        state = x[:, 0]
        for _ in range(self.count):
            state = F.dropout(self.cell(x[:, 1], state), 0.1)
        return state


class Calls(nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(5, 4)), function

    def forward(self, x):
        return self.function(self, x)


MERGED = {
    "layers": (layers(1), (3, 5, 8)),
    "steps": (Steps(3), (3, 2, 8)),
    "requires_grad": (
        Calls(lambda self, x: F.embedding_bag(torch.tensor([[1, 2]]), self.weight) + F.embedding_bag(*_detached(self))),
        (1, 4),
    ),
    "strides": (Calls(lambda self, x: x.reshape(-1) + x.t().reshape(-1) + x.t().contiguous().reshape(-1)), (4, 4)),
    "the same twice": (Calls(lambda self, x: torch.addmm(x, x, x) + torch.addmm(x, x, x.sin())), (4, 4)),
    "several results": (Calls(lambda self, x: torch.stack((*x.chunk(2), *x.cos().chunk(2))).max(0).values), (4, 4)),
    "unused draws": (Calls(lambda self, x: (F.dropout(x), F.dropout(x + 1))[1]), (4,)),
    "zero signs": (Calls(lambda self, x: torch.where(x > 0, 0.0, x) + torch.where(x > 0, -0.0, x)), (4,)),
    "dropout of nothing": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), (4,)),
    "a parameter named input": (nn.Bilinear(4, 4, 3), (2, 4)),
    "left whole": (Calls(lambda self, x: _left_whole(self.weight, x)), (5, 4)),
}


def _left_whole(weight, x):
    """By operators that torch's decomposition leaves as they are, with defaults left out, given and named."""
    y = F.gelu(F.linear(x, weight), approximate="tanh") + F.linear(input=x, weight=weight, bias=x[:, 0])
    y = torch.add(y, F.silu(y), alpha=1) * torch.tanh(y).to(torch.float64)
    index = torch.arange(5)
    y = torch.cat([y, y.clamp(min=0.1)], -1).index_select(1, index).gather(1, index[:, None]).cumsum(0)
    return (
        torch.where(y > 0, y, y.pow(2)).std(0, unbiased=False),
        y.topk(2, 0).values,
        torch.rand_like(y) + torch.rand(5, 1),
    )


def _detached(self):
    return torch.tensor([[1, 2]]), self.weight.detach()


def rows(graph: fx.Graph) -> list:
    index = {node: position for position, node in enumerate(graph.nodes)}

    def described(node: fx.Node) -> tuple:
        values = node.meta.get("val") if isinstance(node.meta.get("val"), tuple | list) else [node.meta.get("val")]
        forms = [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
        name = node.name if node.op == "placeholder" else str(node.target)
        args = fx.node.map_arg((node.args, node.kwargs), lambda each: f"%{index[each]}")
        return name, repr(args), forms, (node.meta.get("custom") or {}).get("origin")

    return [described(node)[: 2 if node.op == "output" else 4] for node in graph.nodes]


@pytest.fixture
def nothing_known():
    """No formulas of earlier captures."""
    clear_formulas()


@pytest.mark.parametrize("name", MERGED)
def test_the_graph_is_torchs_own(name, monkeypatch, nothing_known):
    """Of a first capture, and of a second one that knows all formulas."""
    module, shape = MERGED[name]
    args = (torch.randn(shape),) * (2 if isinstance(module, nn.Bilinear) else 1)
    compared = []

    def both(exported, decompose_whole, is_left_whole):
        by_kind = kinds.functional_by_kind(exported, decompose_whole, is_left_whole)
        whole = decompose_whole(exported)
        compared.append((by_kind, whole))
        return by_kind

    monkeypatch.setattr(decompose, "functional_by_kind", both)
    for _ in range(2):
        capture(module, args, {})
    assert len(compared) == 2
    for by_kind, whole in compared:
        assert rows(by_kind.graph) == rows(whole.graph)
        assert by_kind.graph_signature.input_specs == whole.graph_signature.input_specs
        results = [
            [
                list(graph.nodes).index(next(n for n in graph.nodes if n.name == spec.arg.name))
                for spec in signature.output_specs
            ]
            for graph, signature in ((by_kind.graph, by_kind.graph_signature), (whole.graph, whole.graph_signature))
        ]
        assert results[0] == results[1]


@pytest.mark.parametrize(("make", "shape"), sampled([(layers, (3, 5, 8)), (Steps, (3, 2, 8))], [(Steps, (3, 2, 8))]))
def test_as_many_calls_are_decomposed_for_many_as_for_few(make, shape, monkeypatch):
    """And none for a module of the same layers."""
    calls = []

    def counted(exported):
        calls.append(len(exported.graph.nodes))
        return original(exported)

    original = decompose._decomposed
    monkeypatch.setattr(decompose, "_decomposed", counted)
    for count in (2, 4):
        clear_formulas()
        capture(make(count), (torch.randn(shape),), {})
    assert len(calls) == 2 and calls[0] == calls[1]
    capture(make(3), (torch.randn(shape),), {})
    assert len(calls) == 2


def test_what_is_left_whole_is_not_decomposed(monkeypatch, nothing_known):
    """Neither the first time nor where sizes vary."""
    monkeypatch.setattr(decompose, "_decomposed", None)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(3, 4)
    capture(module, (x,), {})
    capture(module, (x,), {}, dynamic_dims(module, (x,), {}, {"input": {0: torch.export.Dim("rows")}}))


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(4), nn.ReLU(inplace=True), Calls(lambda self, x: x.clone().index_fill_(0, torch.tensor(0), 1.0))],
)
def test_a_graph_with_writes_is_decomposed_as_a_whole(module, monkeypatch):
    found = []

    def noted(*args):
        found.append(kinds.functional_by_kind(*args))
        return found[-1]

    monkeypatch.setattr(decompose, "functional_by_kind", noted)
    x = torch.randn(4, 4)
    capture(nn.Sequential(nn.Linear(4, 4), module), (x,), {})
    assert found == [None]


def test_formulas_depend_on_torchs_settings(monkeypatch, nothing_known):
    """A mean of integers has the default type."""
    module, found = Calls(lambda self, x: (x > 0).mean(dtype=torch.get_default_dtype()) + torch.rand_like(x)), []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            captured = capture(module, (torch.randn(4, 4, dtype=torch.float32),), {})
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([node.meta["val"].dtype for node in captured.graph.nodes if node.op == "call_function"])
    assert found[0] == found[2] != found[1]
