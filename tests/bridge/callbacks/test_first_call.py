"""Dispatch at the first call: in its state, with everything around it; layers that cannot be dispatched stay eager."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge import stats
from bridge.callbacks import DispatchAtFirstCall, chosen_layers
from bridge.callbacks.first_call import LightningMethods


class Block(nn.Module):
    def __init__(self, by_numbers=False):
        super().__init__()
        self.linear, self.dropout, self.by_numbers = nn.Linear(4, 4), nn.Dropout(0.2), by_numbers

    def forward(self, x, *, scale=1.0):
        y = self.dropout(self.linear(x).tanh()) * scale
        return y * (len(y[y > 0]) > 0) if self.by_numbers else y


class Model(nn.Module):
    def __init__(self, *blocks, around=None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block(), Block()])
        self.around = around or (lambda block, x: block(x, scale=2.0))

    def forward(self, x):
        for block in self.blocks:
            x = self.around(block, x)
        return x.float().square().mean()


def steps(model, count=4, length=3):
    """Losses of a training, and of an evaluation after it."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model.train()(torch.randn(length, 4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses += [model.eval()(torch.randn(length, 4)).item() for _ in range(2)]
    return losses


def under_autocast(block, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(x)


def checkpointed(block, x):
    return checkpoint(block, x.requires_grad_(), use_reentrant=False)


@pytest.mark.parametrize("around", [None, under_autocast, checkpointed], ids=["plain", "autocast", "checkpoint"])
def test_every_call_is_dispatched(around):
    model = Model(around=around)
    eager = copy.deepcopy(model)
    callback = DispatchAtFirstCall()
    callback.watch(chosen_layers(model))
    assert steps(model) == pytest.approx(steps(eager), abs=1e-2 if around is under_autocast else 1e-6)
    for block in model.blocks:
        assert not stats(block).misses and stats(block).hits >= 4 + 2  # more where a checkpoint runs them again
    assert list(callback.dispatched) == ["blocks.0", "blocks.1"] and not callback.refused


def test_evaluation_runs_eager_if_that_is_wanted():
    model = Model()
    callback = DispatchAtFirstCall(on_miss="eager")
    callback.watch(chosen_layers(model))
    steps(model)
    assert [stats(block).hits for block in model.blocks] == [4, 4]
    assert callback.report().startswith("2 x Block dispatched to TVM: 8 hits, 4 misses (4 x ")


def test_what_cannot_be_dispatched_stays_eager_with_one_warning(caplog):
    model = Model(Block(by_numbers=True), Block(by_numbers=True), Block())
    eager = copy.deepcopy(model)
    callback = DispatchAtFirstCall()
    callback.watch(chosen_layers(model))
    with caplog.at_level(logging.INFO, logger="bridge.dispatch"):
        assert steps(model) == pytest.approx(steps(eager), abs=1e-6)
        callback.end()
    warnings = [record.getMessage() for record in caplog.records if "stays eager" in record.getMessage()]
    assert len(warnings) == 1 and "as further ones of class Block may: Block cannot be dispatched" in warnings[0]
    assert warnings[0].startswith("blocks.0 ")
    assert list(callback.refused) == ["blocks.0", "blocks.1"] and "data-dependent" in callback.refused["blocks.1"]
    assert list(callback.dispatched) == ["blocks.2"]
    report = "1 x Block dispatched to TVM: 6 hits, 0 misses; 2 stay eager"
    assert callback.report() == report == caplog.records[-1].getMessage()


def test_an_error_of_eagers_is_eagers():
    model = Model()
    DispatchAtFirstCall().watch(chosen_layers(model))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        model(torch.randn(3, 5))


def test_waiting_ends():
    model = Model()
    callback = DispatchAtFirstCall()
    callback.watch(chosen_layers(model))
    callback.stop()
    steps(model, 1)
    assert not callback.dispatched and callback.report() == "nothing dispatched to TVM: 0 hits, 0 misses"


class Held(nn.Module):
    """A stand-in for a LightningModule: steps around a network."""

    def __init__(self, network):
        super().__init__()
        self.network, self.loss = network, nn.MSELoss()

    def training_step(self, batch):
        return self.network(batch)


@pytest.mark.parametrize(
    ("layers", "names"), [(None, ["network.blocks.0", "network.blocks.1"]), ("whole", ["network"])]
)
def test_as_lightnings_loop_calls_it(layers, names):
    module = Held(Model())
    callback = LightningMethods(layers)
    with torch.no_grad():
        module.eval().training_step(torch.randn(3, 4))  # the sanity check of the validation
    callback.on_train_start(None, module.train())
    for _ in range(3):
        module.training_step(torch.randn(3, 4)).backward()
    callback.on_train_end(None, module)
    assert list(callback.dispatched) == names
    assert all(stats(each).hits == 3 and not stats(each).misses for each in callback.dispatched.values())
