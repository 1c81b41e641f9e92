"""Buffers that forward sets to another tensor, in the outermost module and inside of it."""

import copy

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.session import SESSION
from tests.sampling import sampled

PLACES = ("outermost", "inside")


class Tracks(nn.Module):
    """``how`` the mean is moved."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64) * 2)
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))
        self.register_buffer("other", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        now = x.detach().mean(0)
        y = x * self.weight * self.mean
        if self.how == "moves":
            self.mean = self.mean * 0.9 + now * 0.1
        elif self.how == "by a number":
            self.mean = self.mean + now if self.mean.max() < 3 else self.mean * 0.5
        elif self.how == "twice":
            self.mean = self.mean * 0.9
            self.mean = self.mean + now
        elif self.how == "both":
            self.mean, self.other = self.other + now, self.mean * 1.0
        elif self.how == "in the registry":
            self._buffers["mean"] = self.mean * 0.9 + now * 0.1
        elif self.how == "in a loop":
            for row in x.unbind(0):
                self.mean = torch.tanh(self.mean * 0.9 + row.detach() * 0.1) * 0.9
                y = y + torch.sin(row * self.weight) * self.mean
        return y * self.mean


class Wrong(Tracks):
    def forward(self, x):
        y = x * self.weight
        if self.how == "another form":
            self.mean = self.mean.to(torch.float32 if self.mean.dtype == torch.float64 else torch.float64)
        elif self.how == "nothing":
            self.mean = None
        elif self.how == "the argument's memory":
            self.mean = x.detach()[0]
        elif self.how == "exchanged":
            self.mean, self.other = self.other, self.mean
        elif self.how == "a parameter":
            self.weight = nn.Parameter(self.weight.detach() * 0.5)
        return y


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4, dtype=torch.float64), inner

    def forward(self, x):
        return self.inner(self.linear(x))


def made(inner, place):
    torch.manual_seed(0)
    return inner if place == "outermost" else Around(inner)


def trained(module, rows=6):
    """Two calls before their backward, then two steps: losses, gradients, and the buffers afterwards."""
    torch.manual_seed(3)
    found = []
    for together in (2, 1, 1):
        losses = [module(torch.randn(rows, 4, dtype=torch.float64)).square().sum() for _ in range(together)]
        module.zero_grad()
        sum(losses).backward()
        found += [loss.detach() for loss in losses] + [each.grad.clone() for each in module.parameters()]
        found += [each.clone() for each in module.buffers()]
    return found


HOWS = ("moves", "by a number", "twice", "both", "in the registry")
INSIDE = [(how, place) for how in HOWS for place in PLACES]


@pytest.mark.parametrize(
    ("how", "place"), sampled(INSIDE, lambda case: case[1] == "inside" or case[0] == "in the registry")
)
def test_they_have_eagers_numbers(how, place):
    module = made(Tracks(how), place)
    eager = copy.deepcopy(module)
    SESSION.reset("lowerings")  # modules with the same operators would share a capture
    add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
    for ours, theirs in zip(trained(module), trained(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits >= 1


@pytest.mark.parametrize("place", sampled(PLACES, ["inside"]))
def test_in_steps_of_a_loop(place):
    module = made(Tracks("in a loop"), place)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (torch.randn(40, 4, dtype=torch.float64),))
    for ours, theirs in zip(trained(module, 40), trained(eager, 40), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 4


def test_for_sizes_that_vary():
    module = made(Tracks("moves"), "inside")
    eager = copy.deepcopy(module)
    x = torch.randn(6, 4, dtype=torch.float64)
    add_tvm_dispatch(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    for rows in (6, 9):
        for ours, theirs in zip(trained(module, rows), trained(eager, rows), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 8


CASES = [("the argument's memory", "outermost")]
CASES += [(how, place) for how in ("another form", "nothing", "exchanged", "a parameter") for place in PLACES]


@pytest.mark.parametrize(("how", "place"), CASES)
def test_what_cannot_be_written_is_refused(how, place):
    module = made(Wrong(how), place)
    before = dict(module.state_dict(keep_vars=True))
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
    after = module.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())


@pytest.mark.parametrize("place", PLACES)
def test_a_second_name_is_refused(place):
    inner = Tracks("moves")
    inner.register_buffer("again", inner.mean)
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(made(inner, place), (torch.randn(6, 4, dtype=torch.float64),))


class Placeholder(nn.Module):
    """A buffer that the first call gives its shape, as ConViT's relative positions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("places", torch.zeros(1, 1))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        count = x.shape[0]
        if self.places.shape[1] != count:
            self.places = (torch.arange(count)[None] - torch.arange(count)[:, None]).to(x.dtype)
        return self.places.softmax(-1) @ self.linear(x) * self.scale


class Observed(nn.Module):
    """Statistics per channel, which the first batch gives their number, as torch.ao's observers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("most", torch.tensor([]))

    def forward(self, x):
        found = x.detach().abs().amax(0)
        if not self.most.numel():
            self.most.resize_(found.shape).zero_()
        self.most.copy_(torch.maximum(self.most, found))
        return self.linear(x) * self.most


@pytest.mark.parametrize("kind", [Placeholder, Observed])
def test_a_buffer_that_the_first_call_gives_its_shape_is_kept_from_then_on(kind):
    eager, x = kind(), torch.randn(3, 4)
    module = add_tvm_dispatch(copy.deepcopy(eager))
    for _ in range(3):
        torch.testing.assert_close(module(x), eager(x))
    assert stats(module).hits == 2


def test_of_a_sample_too():
    """Where the call can be run twice: memory that the first one resizes is the module's own."""
    eager, x = Placeholder(), torch.randn(3, 4)
    module = add_tvm_dispatch(copy.deepcopy(eager), x)
    assert module.places.shape == (1, 1)
    for _ in range(3):
        torch.testing.assert_close(module(x), eager(x))
    assert stats(module).hits == 2 and torch.equal(module.places, eager.places)
    with pytest.raises(UnsupportedModule, match=r"self\.most\.resize_(?s:.*)call the module once before"):
        add_tvm_dispatch(Observed(), x)
