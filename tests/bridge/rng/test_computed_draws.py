"""Draws with computed parameters: eager's bits, order, gradients and generator; distributions; refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.rng import swap_state
from tests.bridge.compare import Call, Function, assert_same, check_module, run
from tests.sampling import sampled


def leaf(*extents, dtype=torch.float64):
    return torch.randn(*extents, dtype=dtype, requires_grad=True)


def mixed(x):
    """Masks before a computed draw, unused draws, other draws and masks after it."""
    kept = F.dropout(x, 0.2) * torch.bernoulli(torch.rand_like(x) * x.sigmoid())
    torch.rand(3)
    chosen = torch.multinomial(kept.softmax(-1), 2)
    return F.dropout(kept + torch.randn_like(x), 0.3) + x.gather(1, chosen).sum()


def viewed(x):
    """A view that was made before the draw has its numbers."""
    drawn = torch.empty_like(x)
    row = drawn[1]
    drawn.bernoulli_(x.detach().sigmoid())
    return row * x


DRAWS = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "bernoulli, transposed": lambda x: torch.bernoulli(x.t().sigmoid()) * x.t(),
    "bernoulli, expanded": lambda x: torch.bernoulli(x[:1].sigmoid().expand(5, 32)) * x,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x.detach().sigmoid()) * x,
    "bernoulli_, viewed": viewed,
    "multinomial, one": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 1)),
    "multinomial, several": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 3)),
    "multinomial, replaced": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 7, True)),
    "normal": lambda x: torch.normal(x, x.exp()) * x,
    "normal, parts of rows": lambda x: torch.normal(x[:, ::2], x[0, 1::2].exp().expand(5, 16)) * x[:, :16],
    "normal, one number": lambda x: torch.normal(x, 2.0) + torch.normal(0.5, x.exp()) * x,
    "poisson": lambda x: torch.poisson(x.exp()) * x,
    "gamma": lambda x: torch._standard_gamma(x.exp()) * x,
    "generator=None": lambda x: (
        torch.randn(5, 32, generator=None, device=x.device) * x
        + torch.rand((5, 32), generator=None, dtype=x.dtype, device=x.device)
        + torch.randint(1, 9, (5, 32), generator=None, device=x.device)
        + torch.randperm(32, generator=None, device=x.device)
    ),
    "rrelu": lambda x: F.rrelu(F.rrelu(x.t(), 0.1, 0.4, training=True) - 0.2, training=True, inplace=True),
    "mixed": mixed,
}
NUMBERS = {
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0) * x,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2) * x,
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2) * x,
    "cauchy_": lambda x: torch.empty_like(x).cauchy_() * x,
    "log_normal_": lambda x: torch.empty_like(x).log_normal_() * x,
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3) * x,
}
OPTIONS = {"validate_args": False}
DISTRIBUTIONS = {
    "Normal.sample": lambda x: distributions.Normal(x, x.exp(), **OPTIONS).sample() * x,
    "Normal.rsample": lambda x: distributions.Normal(x, x.exp(), **OPTIONS).rsample() * x,
    "Categorical": lambda x: distributions.Categorical(logits=x, **OPTIONS).sample() + x.sum(1),
    "Bernoulli": lambda x: distributions.Bernoulli(logits=x, **OPTIONS).sample() * x,
    "Uniform": lambda x: distributions.Uniform(x, x + 1, **OPTIONS).rsample() * x,
    "Gumbel": lambda x: distributions.Gumbel(x, 1.0, **OPTIONS).rsample() * x,
    "Exponential": lambda x: distributions.Exponential(x.exp(), **OPTIONS).rsample() * x,
    "LogNormal": lambda x: distributions.LogNormal(x, 1.0, **OPTIONS).rsample() * x,
    "Laplace": lambda x: distributions.Laplace(x, x.exp(), **OPTIONS).rsample() * x,
    "Poisson": lambda x: distributions.Poisson(x.exp(), **OPTIONS).sample() * x,
    "Dirichlet": lambda x: distributions.Dirichlet(x.exp(), **OPTIONS).rsample() * x,
    "Beta of numbers": lambda x: distributions.Beta(0.4, 0.4, **OPTIONS).sample() * x,
}


ALIKE = NUMBERS.keys() - {"exponential_", "normal_", "geometric_"}
"""Of numbers alone, as others are; distributions are made of the same few draws."""
ALIKE |= DISTRIBUTIONS.keys() - {"Normal.sample", "Categorical", "Uniform", "Dirichlet"}


@pytest.mark.parametrize("name", sampled({**DRAWS, **NUMBERS, **DISTRIBUTIONS}, lambda name: name not in ALIKE))
def test_draws_are_eagers(name):
    """Over several seeds: values and gradients at rounding, the generator's state to the bit."""
    function = {**DRAWS, **NUMBERS, **DISTRIBUTIONS}[name]
    ours, eager, x = Function(function), Function(function), leaf(5, 32)
    add_tvm_dispatch(ours, x)
    for seed in range(5):
        wanted = run(eager, Call((x,)), seed=seed)
        assert_same(run(ours, Call((x,)), seed=seed), wanted, rtol=1e-10, atol=1e-12)
    assert stats(ours).hits == 5 and not stats(ours).misses


@pytest.mark.parametrize("name", ["bernoulli", "multinomial, replaced", "mixed"])
def test_bits_in_float32(name):
    check_module(lambda: Function(DRAWS[name]), lambda: leaf(5, 32, dtype=torch.float32), calls=3)


@pytest.mark.parametrize("partition", ["recompute_all", "save_all"])
def test_a_draw_that_is_computed_again_is_the_same(partition):
    ours, eager, x = Function(mixed), Function(mixed), leaf(5, 32)
    add_tvm_dispatch(ours, x, partition=partition)
    assert_same(run(ours, Call((x,))), run(eager, Call((x,))), rtol=1e-10, atol=1e-12)


def test_the_stages_agree_with_each_other():
    found = lower(Function(mixed), leaf(5, 32)).check()
    assert found.ok, found


def test_what_eager_refuses_is_eagers_error():
    module, x = Function(lambda x: torch.multinomial(x, 2)), torch.rand(4, 5)
    add_tvm_dispatch(module, x)
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        module(-x)


def failing_index(x, index):
    """A computed draw, then a library step that raises for an index out of range."""
    drawn = distributions.Categorical(logits=F.dropout(x, 0.2), **OPTIONS).sample()
    return drawn.sum() + (torch.bernoulli(x.sigmoid()) * x).gather(1, index)


def failing_check(x, index):
    """A computed draw, then a number that Python reads."""
    drawn = torch.bernoulli(x.sigmoid()) * F.dropout(x, 0.5)
    return drawn * 2 if index.sum() > 3 else drawn + torch.rand_like(x)


FAILING = [(function, gradients) for gradients in (True, False) for function in (failing_index, failing_check)]


@pytest.mark.parametrize("function, gradients", sampled(FAILING, [(failing_index, False), (failing_check, True)]))
def test_a_call_that_fails_after_a_draw_is_eagers_from_the_same_state(function, gradients):
    error = function is failing_index

    class Chosen(nn.Module):
        def forward(self, x, index):
            return function(x, index)

    ours, eager, x = Chosen(), Chosen(), leaf(5, 4)
    good, bad = torch.ones(5, 1, dtype=torch.int64), torch.full((5, 1), 9 if error else 0)
    found = []
    with torch.set_grad_enabled(gradients):
        add_tvm_dispatch(ours, (x, good))
        for module in (eager, ours):
            torch.manual_seed(3)
            first = module(x, good)
            if error:
                with pytest.raises(RuntimeError, match="out of bounds") as raised:
                    module(x, bad)
                second = torch.frombuffer(bytearray(str(raised.value).encode()), dtype=torch.uint8)
            else:
                second = module(x, bad).detach()
            found.append((first.detach(), second, module(x, good).detach(), torch.get_rng_state()))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert stats(ours).hits == 2 and stats(ours).misses


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
def test_a_call_beside_a_thread_that_draws_is_eagers(on_miss, monkeypatch):
    """Its numbers would repeat the other thread's; the next call, undisturbed, is a hit."""

    def disturbed(*states):
        monkeypatch.undo()
        torch.rand(3)
        return swap_state(*states)

    ours, eager, x = Function(mixed), Function(mixed), leaf(5, 32)
    add_tvm_dispatch(ours, x, on_miss=on_miss)
    monkeypatch.setattr("bridge.dispatch.call_run.swap_state", disturbed)
    torch.manual_seed(3)
    drawn = ours(x), ours(x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    F.dropout(x, 0.2), torch.rand_like(x), torch.rand(3)  # the first attempt's draws are lost
    for got in drawn:
        torch.testing.assert_close(got, eager(x), rtol=1e-10, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), state)
    assert stats(ours).hits == 1 and "another thread has drawn" in str(stats(ours).misses)
    assert len(stats(ours).entries) == 1


def test_an_unused_computed_draw_is_refused():
    def forward(x):
        torch.poisson(x.exp())
        return torch.rand_like(x) * x

    with pytest.raises(UnsupportedModule, match="draw"):
        add_tvm_dispatch(Function(forward), leaf(3))
