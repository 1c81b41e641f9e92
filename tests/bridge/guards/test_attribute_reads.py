"""Attributes of objects that forward reads: an entry serves calls with equal values of them alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.errors import DispatchMiss


@dataclass
class Settings:
    scale: float = 2.0
    shift: float = 1.0
    title: str = "a"

    @property
    def both(self):
        return self.scale, self.shift

    def scaled(self, x):
        return x * self.scale


class Layer(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), settings

    def forward(self, x):
        return self.settings.scaled(self.linear(x)) + getattr(self.settings, "more", 0)


def test_a_call_is_compiled_for_what_it_reads():
    """Attributes that forward does not read may change, come and go; read or missing ones may not."""
    settings = Settings()
    layer, x = Layer(settings), torch.randn(2, 4)
    add_tvm_dispatch(layer, x, on_miss="error")
    settings.title, settings.note = "b", ["new"]
    del settings.shift
    layer(x)
    assert stats(layer).hits == 1
    for name, value in (("scale", 3.0), ("more", 1)):
        before = vars(settings).copy()
        setattr(settings, name, value)
        with pytest.raises(DispatchMiss, match="attribute 'settings' of the module changed"):
            layer(x)
        vars(settings).clear()
        vars(settings).update(before)
        layer(x)


def test_a_changed_attribute_is_computed_with():
    settings = Settings()
    layer, x = Layer(settings), torch.randn(2, 4)
    add_tvm_dispatch(layer, x, on_miss="compile")
    for scale in (2.0, -1.0, 2.0):
        settings.scale = scale
        torch.testing.assert_close(layer(x), layer.linear(x) * scale)


ADDRESSES = {
    "storage in a branch that does not run": ("y if isinstance(x, torch.Tensor) else x.storage.value()", 3),
    "data_ptr in a branch that does not run": ("y if self.training else y * x.data_ptr()", 3),
    "a method that is not called": ("y if x.untyped_storage else x", 3),
    "is_set_to": ("y * (1 + x.is_set_to(x[0]))", 0),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses_are_conditions_where_forward_asks_for_them(name):
    """PyTorch Geometric reads ``edge_index.storage`` of sparse edges: of another class than the others."""
    expression, hits = ADDRESSES[name]
    space = {"torch": torch}
    exec(f"def forward(self, x):\n    y = self.layer(x)\n    return {expression}", space)
    module = type("Addresses", (nn.Module,), {"forward": space["forward"]})()
    module.layer = nn.Linear(4, 4)
    add_tvm_dispatch(module, torch.ones(3, 4))
    given = [torch.randn(3, 4) for _ in range(3)]
    for x in given:
        torch.testing.assert_close(module(x), module.layer(x))
    assert stats(module).hits == hits


@pytest.mark.parametrize("asked", ["is_conj", "_is_view"])
def test_how_an_argument_is_stored_is_a_condition_where_forward_asks_for_it(asked):
    class Asks(nn.Module):
        def forward(self, x, y):
            return x * (2.0 + getattr(y, asked)())

    module, x, y = Asks(), torch.ones(2), torch.ones(3, dtype=torch.complex64)
    add_tvm_dispatch(module, (x, y))
    for other, hits in ((y.clone(), 1), (torch.ones(4, dtype=torch.complex64)[:3].conj(), 1)):
        torch.testing.assert_close(module(x, other), module.forward(x, other))
        assert stats(module).hits == hits, dict(stats(module).misses)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.grad_fn is not None,
        lambda x: x.grad_fn.name() == "MulBackward0",
        lambda x: type(x.grad_fn.next_functions[0][0]).__name__ == "AccumulateGrad",
    ],
    ids=["whether it has one", "its name", "behind it"],
)
def test_an_arguments_history_is_refused_by_name(read):
    """Also where forward would raise: the recorded run's own argument has no history."""

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) if read(x) else x

    module, x = Asks(), torch.randn(2, 3, requires_grad=True) * 2
    assert module(x) is not x
    with pytest.raises(UnsupportedModule, match="grad_fn of an argument"):
        add_tvm_dispatch(module, x)


def _doubled(forward):
    return lambda *given: 2 * forward(*given)


BATCH_NORM = {
    "eps": (lambda norm: setattr(norm, "eps", 0.5), "attribute 'eps'"),
    "momentum": (lambda norm: setattr(norm, "momentum", 0.3), "attribute 'momentum'"),
    "statistics": (lambda norm: setattr(norm, "track_running_stats", False), "attribute 'track_running_stats'"),
    "forward": (lambda norm: setattr(_BatchNorm, "forward", _doubled(_BatchNorm.forward)), "forward of class"),
    "function": (lambda norm: setattr(F, "batch_norm", lambda x, *rest: 2 * x), "functional.batch_norm' changed"),
}


@pytest.mark.parametrize("mode", ["refuse", "compile"])
@pytest.mark.parametrize("case", BATCH_NORM)
def test_what_a_batch_norm_with_cumulative_averages_reads_is_a_condition(case, mode, monkeypatch):
    """Its forward is replaced while it is recorded, so that the stand-in's reads are noted."""
    monkeypatch.setattr(_BatchNorm, "forward", _BatchNorm.forward)  # put back afterwards
    monkeypatch.setattr(F, "batch_norm", F.batch_norm)
    torch.manual_seed(0)
    x, module = torch.randn(5, 3, dtype=torch.float64), nn.Sequential(nn.BatchNorm1d(3, momentum=None)).double()
    twin = copy.deepcopy(module)
    add_tvm_dispatch(module, x, on_miss="compile" if mode == "compile" else "eager")
    change, reason = BATCH_NORM[case]
    for step in range(3):
        for norm in (twin[0], module[0]) if step == 1 and case not in ("forward", "function") else ():
            change(norm)
        if step == 1 and case in ("forward", "function"):
            change(None)
        assert torch.allclose(module(x), twin(x), atol=1e-12)
        assert all(map(torch.allclose, module.buffers(), twin.buffers()))
    assert mode == "compile" or (stats(module).hits == 1 and reason in str(stats(module).misses))


@pytest.mark.parametrize("name", ["clone", "contiguous", "detach", "permute"])
def test_a_replaced_method_that_compiled_calls_run_is_a_miss(name, monkeypatch):
    """Forward does not call it; a compiled call would (a library's operand, a saved tensor)."""
    torch.manual_seed(0)
    x, module = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), nn.LSTMCell(3, 5).double()
    twin, own = copy.deepcopy(module), getattr(torch.Tensor, name)
    add_tvm_dispatch(module, x)
    monkeypatch.setattr(torch.Tensor, name, lambda *args, **kwargs: 1.25 * own(*args, **kwargs))
    found = torch.autograd.grad(module(x)[0].sum(), [x, *module.parameters()])
    assert all(map(torch.allclose, found, torch.autograd.grad(twin(x)[0].sum(), [x, *twin.parameters()])))
    monkeypatch.undo()
    module(x)
    assert stats(module).hits == 1 and "class Tensor" in str(stats(module).misses)
