"""Profitability: an entry is timed when it is added, without a trace in the module; too small work is logged."""

import copy
import logging
import time

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.dispatch.profitability import Profitability, measure_profitability
from bridge.state import SampleCall
from bridge.trials import Pace


class Counted(nn.Module):
    """Draws in train mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.tanh(self.linear(x)))


@pytest.mark.cpu("eager is not timed on a GPU")
def test_measuring_leaves_no_trace():
    torch.manual_seed(0)
    module = Counted()
    module.linear.weight.grad = torch.ones(4, 4)
    before, wanted = torch.get_rng_state(), copy.deepcopy(module.state_dict())
    add_tvm_dispatch(module, torch.ones(3, 4))
    (entry,) = stats(module).entries
    assert entry.worth is not None and entry.worth.ours > 0 and entry.worth.eager > 0
    assert (entry.hits, stats(module).hits) == (0, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(module.linear.weight.grad, torch.ones(4, 4)) and module.linear.bias.grad is None
    assert all(torch.equal(value, wanted[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    "module, shape",
    [(nn.Linear(512, 512), (512, 512)), (nn.BatchNorm1d(4), (3, 4))],
    ids=["much work", "writes buffers"],
)
def test_some_calls_are_not_timed(module, shape):
    add_tvm_dispatch(module, torch.ones(shape))
    assert stats(module).entries[0].worth is None


def test_what_has_hooks_is_not_timed():
    module = nn.Linear(4, 4)
    heard = []
    module.weight.register_hook(heard.append)
    add_tvm_dispatch(module, torch.ones(3, 4))
    assert not heard and stats(module).entries[0].worth is None


@pytest.mark.parametrize("ours, told", [(2e-5, True), (1.1e-5, False), (5e-6, False)])
def test_eager_being_quicker_is_told(monkeypatch, caplog, ours, told):
    monkeypatch.setattr("bridge.dispatch.dispatcher.measure_profitability", lambda *_: Profitability(ours, 1e-5))
    with caplog.at_level(logging.WARNING, "bridge.dispatch"):
        module = add_tvm_dispatch(nn.Linear(4, 4), torch.ones(3, 4))
    words = "eager is quicker: 20 us dispatched, 10 us eager"
    assert (words in caplog.text) == told and (words in repr(stats(module))) == told


@pytest.mark.cpu("eager is not timed on a GPU")
def test_the_slower_one_is_found(monkeypatch):
    """A forward that sleeps is slower in eager: its compiled call does not sleep."""
    monkeypatch.setattr("bridge.dispatch.profitability._PACE", Pace(fewest=6, most=6, warm_up=2))

    class Waits(nn.Linear):
        def forward(self, x):
            time.sleep(0.002)
            return super().forward(x)

    module = Waits(4, 4)
    x = torch.ones(3, 4)
    add_tvm_dispatch(module, x)
    worth = measure_profitability(stats(module).entries[0], SampleCall(module, (x,), {}))
    assert worth.eager > 0.002 and not worth.is_slower
