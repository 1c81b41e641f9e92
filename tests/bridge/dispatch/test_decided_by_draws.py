"""Forwards that choose their branches by random draws (layer drop): the modules inside are dispatched by themselves."""

import logging
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.capture import capture
from bridge.dispatch.options import dispatcher_of
from bridge.state import SampleCall
from tests.bridge.beside import double

pytestmark = pytest.mark.usefixtures("lowered_once")

WIDTH, LAYERS, DROP = 6, 3, 0.4

DRAWS = {
    "torch": lambda: torch.rand([]) < DROP,
    "item": lambda: torch.rand(1).item() < DROP,
    "filled": lambda: bool(torch.empty(()).bernoulli_(DROP)),
    "integer": lambda: int(torch.randint(0, 10, (1,))) < 10 * DROP,
    "random": lambda: random.random() < DROP,
    "numpy": lambda: np.random.rand() < DROP,
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.2, self.training)


class Encoder(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layers, self.draw = nn.ModuleList(Layer() for _ in range(LAYERS)), draw

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.draw():
                continue
            x = layer(x)
        return x


class Model(nn.Module):
    """The module that decides is a child."""

    def __init__(self, draw):
        super().__init__()
        self.stem, self.encoder, self.head = nn.Linear(WIDTH, WIDTH), Encoder(draw), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(self.stem(x))))


class Root(nn.Sequential):
    """The module that decides is the dispatched one; its first layer may be any of them."""

    def __init__(self, draw):
        super().__init__(Encoder(draw))

    def forward(self, x):
        return self[0].forward(x)


def pair(kind, draw):
    torch.manual_seed(0)
    one, other = kind(draw).double(), kind(draw).double()
    other.load_state_dict(one.state_dict())
    return one, other


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def trained(module, steps=12):
    """Each step's loss, gradients, and states of generators afterwards."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(double(step, 4, WIDTH)).square().mean()
        if loss.requires_grad:
            loss.backward()
        seen.append((loss.detach(), [each.grad for each in module.parameters()], generators()))
        optimizer.step()
    return seen


def assert_alike(ours, theirs):
    for (loss, gradients, states), (wanted, grads, drawn) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-12)
        assert [each is None for each in gradients] == [each is None for each in grads]
        torch.testing.assert_close(
            [each for each in gradients if each is not None],
            [each for each in grads if each is not None],
            rtol=1e-10,
            atol=1e-12,
        )
        assert states == drawn


def calls_eager_misses(module):
    return sum(count for reason, count in stats(module).misses.items() if not reason.startswith(": no entry"))


CASES = [(draw, Model, {}) for draw in DRAWS]
CASES += [("torch", kind, how) for kind in (Model, Root) for how in ({"on_miss": "compile"}, "no sample")]
CASES += [
    ("torch", Encoder, {"on_miss": "compile"}),
    ("torch", Model, {"on_miss": "error"}),
    ("torch", Model, {"whole": False}),
]
CASES += [("random", Model, "no sample")]


@pytest.mark.composes(
    "forward chooses a branch by a draw: layer drop, stochastic depth, by `torch.rand`, `random` or `numpy.random`",
    "draws and decisions stay eager's, the modules inside are dispatched by themselves, with one message",
    section="Guards",
)
@pytest.mark.parametrize(("draw", "kind", "how"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_layers_that_draws_skip(draw, kind, how, caplog):
    ours, eager = pair(kind, DRAWS[draw])
    before = generators()
    sample = () if how == "no sample" else (double(9, 4, WIDTH),)
    with caplog.at_level(logging.WARNING, "bridge.dispatch"):
        add_tvm_dispatch(ours, *sample, **({} if how == "no sample" else how))
        assert generators() == before
        found = trained(ours)
    wanted = trained(eager)
    assert_alike(found, wanted)
    assert any(each is None for _, grads, _ in wanted for each in grads), "nothing was skipped"
    said = [each for each in caplog.messages if "draws decide what runs" in each]
    assert len(said) == 1, said
    told = stats(ours)
    layers = [path for path in told.parts if "layers." in path]
    assert len(layers) == LAYERS
    assert sum(told.parts[path].hits for path in layers) > LAYERS
    assert not calls_eager_misses(ours)
    remove_tvm_dispatch(ours)
    assert not any(dispatcher_of(each) for each in ours.modules())


def test_a_draw_that_never_decides_otherwise_is_compiled_whole():
    class Never(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            noise = torch.rand(3)
            if torch.rand([]) < 0.0 or torch.isnan(noise).any():
                return x
            y = nn.functional.dropout(self.inner(x))
            return y if torch.isfinite(y).all() else x

    module = Never()
    captured = capture(SampleCall(module, (torch.ones(2, WIDTH),)))
    assert captured.numbers.by_draws == ()
    add_tvm_dispatch(module, torch.ones(2, WIDTH))
    module(torch.ones(2, WIDTH))
    assert [stats(module).hits, len(stats(module).entries)] == [1, 1]
    assert dispatcher_of(module) and not dispatcher_of(module.inner)


def test_whole_is_one_decision():
    ours, eager = pair(Model, DRAWS["torch"])
    torch.manual_seed(3)
    add_tvm_dispatch(ours, double(9, 4, WIDTH), whole=True)
    assert dispatcher_of(ours) and not dispatcher_of(ours.stem)
    assert_alike(trained(ours), trained(eager))
    assert stats(ours).hits + stats(ours).misses.total() == 12 and "number read at" in str(stats(ours).misses)
    with pytest.raises(UnsupportedModule, match="not torch's"):
        add_tvm_dispatch(pair(Model, DRAWS["random"])[0], double(9, 4, WIDTH), whole=True)


@pytest.mark.parametrize("whole", [None, False])
def test_nothing_inside_to_dispatch(whole):
    """Then it is compiled for one decision, as ever."""

    class Leaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(double(1, WIDTH))

        def forward(self, x):
            return x * self.weight if torch.rand([]) < DROP else x.exp() * self.weight

    ours, eager = Leaf(), Leaf()
    add_tvm_dispatch(ours, double(9, 4, WIDTH), whole=whole)
    assert_alike(trained(ours), trained(eager))
    assert 0 < stats(ours).hits < 12
    learns = Leaf()
    add_tvm_dispatch(learns)
    assert_alike(trained(learns), trained(Leaf()))
    assert stats(learns).hits == 12


@pytest.mark.parametrize("sample", [True, False])
def test_evaluation_is_compiled_whole_and_training_in_parts(sample):
    ours, eager = pair(Model, DRAWS["torch"])
    add_tvm_dispatch(ours.eval(), *([double(9, 4, WIDTH)] if sample else []), on_miss="compile")
    eager.eval()
    for training in (False, True, False):
        for each in (ours, eager):
            each.train(training)
        with nullcontext() if training else torch.no_grad():
            assert_alike(trained(ours, 6), trained(eager, 6))
    assert dispatcher_of(ours).entries.hits > 0
    assert sum(each.hits for path, each in stats(ours).parts.items() if "layers." in path) > 3
