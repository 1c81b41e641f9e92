"""Equal calls share one lowering, calls that differ in anything do not: by recorded runs, not by declarations."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge import UnsupportedModule, add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.capture import RecordedCall
from bridge.state.values import constant_key
from tests.bridge.compare import as_call, assert_same, run

reuse = sys.modules["bridge.lowering.reuse"]
SETTING = 1.0


@pytest.fixture(autouse=True)
def _nothing_known():
    SESSION.reset("lowerings")
    yield
    SESSION.reset("lowerings")


@pytest.fixture
def captures(monkeypatch) -> list[nn.Module]:
    """The modules that were captured, in order."""
    captured = []
    capture = RecordedCall.captured

    def spy(call: RecordedCall):
        captured.append(call.call.module)
        return capture(call)

    monkeypatch.setattr(RecordedCall, "captured", spy)
    return captured


class Block(nn.Module):
    """A layer whose ``forward`` depends on an attribute in ways that its parameters and submodules do not show."""

    def __init__(self, way: str, index: int = 0):
        super().__init__()
        self.way, self.index = way, index
        self.linear = nn.Linear(4, 4)
        self.first = nn.Parameter(torch.randn(4))
        self.second = nn.Parameter(torch.randn(4))
        self.register_buffer("steps", torch.zeros(4))
        self.double()

    def forward(self, x: Tensor, flag: float = 1.0) -> tuple[Tensor, ...]:
        hidden, more = self.linear(x), self.linear(x).tanh()
        match self.way:
            case "other operand":
                return hidden * self.second, more
            case "other order":
                return more, hidden * self.first
            case "other constant":
                return hidden * self.first * 1.5, more
            case "global":
                return hidden * self.first * SETTING, more
            case "detached":
                return hidden.detach() * self.first, more
            case "no_grad":
                with torch.no_grad():
                    more = more * 2.0
                return hidden * self.first, more
            case "grad":
                return hidden * self.first, more * 2.0
            case "literal":
                return hidden * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype), more
            case "other literal":
                return hidden * torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=x.dtype), more
            case "dropout":
                return functional.dropout(hidden, 0.25, self.training) * self.first, more
            case "more dropout":
                return functional.dropout(hidden, 0.5, self.training) * self.first, more
            case "assigned buffer":
                self.steps = self.steps * 0.5 + 1.0
            case "computed buffer":
                _ = self.steps * 0.5 + 1.0
            case "buffer in place":
                self.steps.add_(1.0)
            case "seeds":
                torch.manual_seed(3)
            case "counts":
                self.index += 1
        return hidden * self.first, more


def sample() -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


def check_parity(module: nn.Module, x: Tensor) -> None:
    """The dispatched module against a copy of it, which is a plain module."""
    plain, call = copy.deepcopy(module), as_call(x)
    hits = stats(module).hits
    assert_same(run(module, call, seed=5), run(plain, call, seed=5))
    assert stats(module).hits == hits + 1


def test_equal_layers_are_captured_once(captures):
    layers = [Block("dropout", index) for index in range(3)]
    x = sample()
    for layer in layers:
        add_tvm_dispatch(layer, x)
    assert captures == layers[:1]
    lowered = {id(stats(layer).entries[0].lowered) for layer in layers}
    assert len(lowered) == 1
    for layer in layers:
        check_parity(layer, x)


WAYS = [
    ("plain", "other operand"),
    ("plain", "other order"),
    ("plain", "other constant"),
    ("plain", "detached"),
    ("no_grad", "grad"),
    ("literal", "other literal"),
    ("dropout", "more dropout"),
    ("computed buffer", "assigned buffer"),
    ("plain", "buffer in place"),
]


@pytest.mark.parametrize(("one", "other"), WAYS)
def test_what_forward_does_tells_layers_apart(captures, one, other):
    layers = [Block(one), Block(other), Block(other)]
    x = sample()
    for layer in layers:
        add_tvm_dispatch(layer, x)
    assert captures == layers[:2]
    for layer in layers:
        check_parity(layer, x)


def test_a_global_that_forward_reads_is_seen(captures, monkeypatch):
    first, second = Block("global"), Block("global")
    x = sample()
    add_tvm_dispatch(first, x)
    monkeypatch.setitem(globals(), "SETTING", 3.0)
    add_tvm_dispatch(second, x)
    assert captures == [first, second]
    check_parity(second, x)


def test_arguments_and_modes_tell_calls_apart(captures):
    x = sample()
    layers = [Block("dropout") for _ in range(7)]
    layers[2].eval()
    layers[3].linear.weight.requires_grad_(False)
    layers[4].second = layers[4].first
    add_tvm_dispatch(layers[0], x)
    add_tvm_dispatch(layers[1], torch.randn(2, 4, dtype=torch.float64, requires_grad=True))
    for layer in layers[2:5]:
        add_tvm_dispatch(layer, x)
    add_tvm_dispatch(layers[5], x.detach())
    with torch.no_grad():
        add_tvm_dispatch(layers[6], x)
    assert captures == layers
    for layer in (layers[0], *layers[2:5]):
        check_parity(layer, x)


def test_an_argument_that_only_looks_equal(captures):
    layers = [Block("plain") for _ in range(3)]
    for layer, flag in zip(layers, (1.0, 1, True), strict=True):
        add_tvm_dispatch(layer, (sample(), flag))
    assert captures == layers


def test_parameters_that_share_memory(captures):
    """A write through one name is seen through the other, which no operator shows."""

    class Writes(nn.Module):
        def __init__(self, shared: bool):
            super().__init__()
            memory = torch.zeros(8, dtype=torch.float64)
            self.register_buffer("left", memory[:4] if shared else torch.zeros(4, dtype=torch.float64))
            self.register_buffer("right", memory[:4].view(4) if shared else torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.left + self.right

    x = sample()
    apart, together = Writes(False), Writes(True)
    add_tvm_dispatch(apart, x)
    add_tvm_dispatch(together, x)
    assert captures == [apart, together]


@pytest.mark.parametrize("ways", [("plain", "counts", "plain"), ("counts", "plain", "counts")])
def test_a_module_that_counts_is_not_one_that_does_not(ways):
    x = sample()
    for way in ways:
        layer = add_tvm_dispatch(Block(way), x)
        layer(x), layer(x)
        assert layer.index == (2 if way == "counts" else 0) and stats(layer).hits == 2


class Settles(nn.Module):
    """Its first call chooses a kind, as classifiers of transformers do (``config.problem_type``)."""

    def __init__(self, kind: str | None = None):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4, dtype=torch.float64), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.kind is None:
            self.kind = "wide" if x.shape[-1] > 3 else "narrow"
        return hidden.cos() if self.kind == "wide" else hidden.tan()


def test_attributes_that_the_first_call_sets(captures):
    """The second call is captured and looked up; the attributes stay set, as after a capture."""
    modules, x = [Settles(), Settles(), Settles("wide"), Settles("narrow")], sample()
    for module in modules:
        add_tvm_dispatch(module, x)
        check_parity(module, x)
    assert captures == [modules[0], modules[3]]
    assert [module.kind for module in modules] == ["wide", "wide", "wide", "narrow"]


class Configures(nn.Module):
    """Its first call sets an attribute of an object that it holds."""

    def __init__(self):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4, dtype=torch.float64), SimpleNamespace(kind=None)

    def forward(self, x: Tensor) -> Tensor:
        self.config.kind = self.config.kind or "wide"
        return self.linear(x).sin()


def test_a_first_call_that_sets_attributes_is_not_decomposed(monkeypatch):
    """The first call's functional graph would be of no use."""
    recording = sys.modules["bridge.capture.record_call"]
    made, functional = [], recording.functional_graph
    monkeypatch.setattr(recording, "functional_graph", lambda *args: made.append(1) or functional(*args))
    module = add_tvm_dispatch(Configures(), sample())
    check_parity(module, sample())
    assert len(made) == 1 and module.config.kind == "wide"


def test_what_no_operator_shows_is_still_refused():
    x = sample()
    known = Block("plain")
    add_tvm_dispatch(known, x)
    layer = Block("seeds")
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(layer, x)
    assert layer.index == 0
    assert not hasattr(layer, "_compiled_call_impl") or layer._compiled_call_impl is None


def test_tensor_attributes_are_captured_each_time(captures):
    class Scaled(nn.Module):
        def __init__(self, scale: float):
            super().__init__()
            self.scale = torch.full((4,), scale, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    x = sample()
    layers = [Scaled(2.0), Scaled(3.0)]
    for layer in layers:
        add_tvm_dispatch(layer, x)
        check_parity(layer, x)
    assert captures == layers


def test_a_strategy_object_is_compared_by_value(captures):
    from partition import MinCut

    x = sample()
    layers = [Block("dropout") for _ in range(5)]
    for layer, strategy in zip(
        layers,
        (MinCut(budget=0.5), MinCut(budget=0.5), MinCut(budget=0.25), "save_all", MinCut(policy=lambda node: None)),
        strict=True,
    ):
        add_tvm_dispatch(layer, x, partition=strategy)
    assert captures == [layers[0], *layers[2:]]


def test_nothing_is_kept_for_modules_that_are_gone():
    x = sample()
    layer = Block("dropout")
    add_tvm_dispatch(layer, x)
    lowered = weakref.ref(stats(layer).entries[0].lowered)
    parameter = weakref.ref(layer.first)
    twin = Block("dropout")
    add_tvm_dispatch(twin, x)
    del layer
    gc.collect()
    assert parameter() is None
    assert lowered() is stats(twin).entries[0].lowered
    remove_tvm_dispatch(twin)
    gc.collect()
    assert lowered() is None


def test_constants_that_operators_tell_apart():
    values = [0.0, -0.0, 0, False, 1, 1.0, True, None, "1", torch.float32, torch.device("cpu")]
    assert len({constant_key(value) for value in values}) == len(values)
    assert constant_key(float("nan")) == constant_key(float("nan"))
    assert constant_key(object()) is None


class Asking(nn.Module):
    """A module whose traced forward ignores ``factor``."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x.sin() * (2.0 if torch.compiler.is_compiling() else self.factor)


def test_what_eager_alone_does_tells_layers_apart(captures):
    layers, x = [Asking(2.0), Asking(3.0), Asking(2.0), Asking(3.0)], sample()
    for layer in layers:
        add_tvm_dispatch(layer, x)
    assert captures == layers[:2]
    for layer in layers:
        check_parity(layer, x)


@pytest.mark.parametrize("enabled", [False, True])
def test_layers_that_ask_whether_they_are_traced_are_alike_under_autocast(captures, enabled):
    class Layer(nn.Linear):
        factor = 2.0

        def forward(self, x):
            return super().forward(x) * (2.0 if torch.compiler.is_compiling() else self.factor)

    layers, x = [Layer(4, 4), Layer(4, 4)], torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        for layer in layers:
            add_tvm_dispatch(layer, x)
    assert captures == layers[:1]
