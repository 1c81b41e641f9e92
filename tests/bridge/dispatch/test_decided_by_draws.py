"""Forwards that choose their branches by random draws (layer drop): the modules inside are dispatched by themselves."""

import logging
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, remove_tvm_dispatch, stats
from bridge.capture import capture
from bridge.dispatch.options import dispatcher_of
from bridge.state import SampleCall
from tests.bridge.beside import double

pytestmark = pytest.mark.usefixtures("lowered_once")

WIDTH, LAYERS, DROP = 6, 3, 0.4

OWN_NUMPYS, OWN_STATE, OWN_PYTHONS = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
OWN_TORCHS = torch.Generator()

DRAWS = {
    "torch": lambda: torch.rand([]) < DROP,
    "item": lambda: torch.rand(1).item() < DROP,
    "filled": lambda: bool(torch.empty(()).bernoulli_(DROP)),
    "integer": lambda: int(torch.randint(0, 10, (1,))) < 10 * DROP,
    "random": lambda: random.random() < DROP,
    "numpy": lambda: np.random.rand() < DROP,
    "uniform": lambda: np.random.uniform(0, 1) < DROP,
    "gauss": lambda: random.gauss(0, 1) > 0.3,
    "own numpy": lambda: OWN_NUMPYS.random() < DROP,
    "own state": lambda: OWN_STATE.binomial(1, DROP) == 1,
    "own random": lambda: OWN_PYTHONS.random() < DROP,
    "own torch": lambda: torch.rand([], generator=OWN_TORCHS) < DROP,
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


class Straight(Encoder):
    """Which layer is the first, whose argument needs no gradient, differs between calls."""

    def __init__(self, draw):
        super().__init__(draw)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(super().forward(x))


class Nested(Straight):
    """A module that decides inside one that does."""

    def __init__(self, draw):
        super().__init__(draw)
        self.layers = nn.ModuleList(Encoder(draw) for _ in range(2))


class Dropped(Straight):
    """The block decides itself; torchvision's stochastic depth and timm's drop path scale its branch by a mask."""

    def __init__(self, draw):
        super().__init__(lambda: False)
        self.layers = nn.ModuleList(Dropped.Block(draw) for _ in range(LAYERS))

    class Block(nn.Module):
        def __init__(self, draw):
            super().__init__()
            self.branch, self.draw = Layer(), draw

        def forward(self, x):
            if self.training and self.draw():
                return x
            keep = x.new_empty(x.shape[0], 1).bernoulli_(1 - DROP) if self.training else 1
            return x + self.branch(x) * keep


class Biased(Straight):
    """The first layer that runs makes an argument of later ones (T5's bias of positions)."""

    def __init__(self, draw):
        super().__init__(draw)
        self.layers = nn.ModuleList(Biased.Layer() for _ in range(LAYERS))

    class Layer(Layer):
        def forward(self, x, bias=None):
            bias = self.up(x) if bias is None else bias
            return super().forward(x) + bias, bias

    def forward(self, x):
        bias = None
        for layer in self.layers:
            if not self.draw():
                x, bias = layer(x, bias=bias)
        return self.head(x)


class Rare(Straight):
    """A branch that no run of the sample takes, and that decides itself."""

    def __init__(self, draw):
        super().__init__(draw)
        self.usual, self.rare = self.layers.pop(0), Encoder(draw)

    def forward(self, x):
        return self.head(self.rare(x) if random.random() < 0.1 else self.usual(x))


class Sized(Straight):
    """A layer gets a ``torch.Size``."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, size):
            return torch.tanh(x * self.weight) + size.numel()

    def __init__(self, draw):
        super().__init__(draw)
        self.shift = Sized.Shift()

    def forward(self, x):
        return super().forward(self.shift(x, x.shape))


def pair(kind, draw):
    torch.manual_seed(0)
    one, other = kind(draw).double(), kind(draw).double()
    other.load_state_dict(one.state_dict())
    return one, other


def generators():
    pythons = random.getstate(), OWN_PYTHONS.getstate()
    numpys = np.random.get_state()[1].tolist(), str(OWN_STATE.get_state()), str(OWN_NUMPYS.bit_generator.state)
    return torch.get_rng_state().tolist(), OWN_TORCHS.get_state().tolist(), *pythons, *numpys


def trained(module, steps=12, rate=0.1):
    """Each step's loss, gradients, and states of generators afterwards."""
    for seed in (torch.manual_seed, OWN_TORCHS.manual_seed, random.seed, OWN_PYTHONS.seed, np.random.seed):
        seed(1)
    OWN_STATE.seed(1)
    OWN_NUMPYS.bit_generator.state = np.random.default_rng(1).bit_generator.state
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=rate), []
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


CASES = [(draw, Model, {}) for draw in DRAWS]
CASES += [("torch", kind, how) for kind in (Model, Root) for how in ({"on_miss": "compile"}, "no sample")]
CASES += [
    ("torch", Encoder, {"on_miss": "compile"}),
    ("torch", Model, {"on_miss": "error"}),
    ("torch", Model, {"whole": False}),
]
CASES += [("random", Model, "no sample")]


@pytest.mark.composes(
    "forward chooses a branch by a draw: layer drop, stochastic depth, by `torch.rand`, `random`, `numpy.random` or a "
    "generator of its own",
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
    assert not stats(ours).misses
    remove_tvm_dispatch(ours)
    assert not any(dispatcher_of(each) for each in ours.modules())


@pytest.mark.composes(
    "forward chooses a branch by a draw: layer drop, stochastic depth, by `torch.rand`, `random`, `numpy.random` or a "
    "generator of its own"
)
@pytest.mark.parametrize(
    ("kind", "sample"),
    [
        (Straight, True),
        (Nested, True),
        (Dropped, True),
        (Biased, True),
        (Rare, True),
        (Straight, False),
        (Sized, False),
    ],
)
def test_calls_that_no_run_of_the_sample_made(kind, sample):
    """They are compiled when they come: every call of a part is a hit."""
    ours, eager = pair(kind, DRAWS["torch"])
    add_tvm_dispatch(ours, *([double(9, 4, WIDTH)] if sample else []))
    assert_alike(trained(ours, 30, 0.01), trained(eager, 30, 0.01))
    told = stats(ours)
    assert told.hits >= 30 and not told.misses
    if kind is Rare:
        assert [each.path for each in told.eager] == ["", "rare"] and any("rare.layers." in path for path in told.parts)
    if kind is Sized:
        assert "a Size: not a tensor" in str(told.eager[-1])
    remove_tvm_dispatch(ours)
    assert not any(dispatcher_of(each) for each in ours.modules())


def test_a_given_on_miss_holds_for_parts():
    ours, eager = pair(Straight, DRAWS["torch"])
    add_tvm_dispatch(ours, double(9, 4, WIDTH), on_miss="eager")
    assert_alike(trained(ours, 30, 0.01), trained(eager, 30, 0.01))
    assert "requires_grad of args[0]" in str(stats(ours).misses)


def test_an_error_of_eagers_for_other_draws():
    """The search for calls raises none of eager's errors at a call that eager would not raise it for."""

    class Fails(Straight):
        def forward(self, x):
            if torch.rand([]) < DROP:
                raise ValueError("drawn")
            return self.head(x)

    ours, eager = pair(Fails, None)
    add_tvm_dispatch(ours)
    failed = []
    for module in (ours, eager):
        torch.manual_seed(0)
        for step in range(12):
            try:
                module(double(step, 4, WIDTH))
            except ValueError as error:
                failed.append((module is ours, step, str(error)))
    assert [each[1:] for each in failed if each[0]] == [each[1:] for each in failed if not each[0]] != []


@pytest.mark.parametrize("draw", ["torch", "random", "own numpy", "own torch"])
def test_a_dry_run_says_it(draw):
    told = str(examine(pair(Model, DRAWS[draw])[0], double(9, 4, WIDTH)))
    assert "at every call" not in told
    assert "draw" in told and "dispatches the modules inside by themselves" in told


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
