"""Scalar guards: a call is dispatched where its numbers equal the sample's, else eager and counted."""

import copy
import math

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, examine, explain, lower, stats
from tests.bridge.compare import Call, assert_same, run
from tests.device import ASSERTS
from tests.sampling import sampled

F64 = torch.float64


class Written(nn.Module):
    """A linear layer, and a function of it and the arguments; it writes and draws before it reads anything."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.function = function

    def forward(self, *args):
        self.calls += 1
        return self.function(self.linear, *args) + torch.rand(())


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X, POSITIVE, ONES = draw(3, 4), draw(3, 4, seed=1).exp(), torch.ones(3, 4, dtype=F64)
NAN = torch.full((3, 4), math.nan, dtype=F64)
LABELS = torch.tensor([0, 1, 3])


def dispatched(module: nn.Module, *sample, **options) -> tuple[nn.Module, nn.Module]:
    """An eager module, and a dispatched copy of it."""
    module = module.double()
    eager = copy.deepcopy(module)
    return eager, add_tvm_dispatch(module, sample, **options)


def outcome(module: nn.Module, args: tuple) -> tuple:
    """The error of a call that fails, the buffers after it, and the next draw."""
    torch.manual_seed(3)
    with pytest.raises(Exception) as caught:
        module(*args)
    return type(caught.value), str(caught.value), dict(module.named_buffers()), torch.rand(())


def check(module: nn.Module, good: tuple, *, bad: tuple | None = None, other: tuple | None = None) -> None:
    """``good`` is the sample, and a hit; ``bad`` raises as in eager; ``other`` goes another way, in eager."""
    eager, module = dispatched(module, *good)
    for args in (good, other, good):
        if args is not None:
            assert_same(run(module, Call(args)), run(eager, Call(args)))
    misses = int(other is not None)
    if bad is not None:
        assert outcome(module, bad) == outcome(eager, bad)
        assert_same(run(module, Call(good)), run(eager, Call(good)))
        misses += 1
    counted = stats(module)
    assert (counted.hits, counted.misses.total()) == (2 + (bad is not None), misses), counted


def scored(make, *more):
    """A distribution with parameters from the layer, its log-density at the last argument, ``more`` of its methods."""

    def function(linear, *args):
        distribution = make(linear, *args[:-1])
        total = distribution.log_prob(args[-1]).sum()
        return sum([getattr(distribution, name)().sum() for name in more], total)

    return function


DISTRIBUTIONS = {
    "Normal": (scored(lambda h, x: D.Normal(h(x), x.exp()), "entropy"), (X, X), (X, NAN)),
    "Categorical": (scored(lambda h, x: D.Categorical(logits=h(x)), "entropy"), (X, LABELS), (X, LABELS + 1)),
    "Bernoulli": (scored(lambda h, x: D.Bernoulli(logits=h(x)), "entropy"), (X, ONES), (X, ONES / 2)),
    "Uniform": (scored(lambda h, x: D.Uniform(h(x) - 5, h(x) + 5)), (X, X), (X, X + 50)),
    "Gumbel": (scored(lambda h, x, s: D.Gumbel(h(x), s), "entropy"), (X, POSITIVE, X), (X, -POSITIVE, X)),
    "Beta": (scored(lambda h, x: D.Beta(F.softplus(h(x)), x.exp()), "entropy"), (X, ONES / 2), (X, ONES * 2)),
    "TanhTransform": (
        scored(lambda h, x: D.TransformedDistribution(D.Normal(h(x), x.exp()), [D.TanhTransform()])),
        (X, X.tanh()),
        (X, X * 50),
    ),
    "kl_divergence": (
        lambda h, x, s: D.kl_divergence(D.Normal(h(x), s), D.Normal(x, s)).sum(),
        (X, POSITIVE),
        (X, -POSITIVE),
    ),
}


@pytest.fixture
def validated(monkeypatch):
    """Dynamo turns validation off for the whole process."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sampled(
        [pytest.param(n, marks=ASSERTS) if n == "Categorical" else n for n in DISTRIBUTIONS],
        lambda name: name not in ("Bernoulli", "Gumbel", "Beta", "kl_divergence"),
    ),
)
def test_distributions_with_validation(name, validated):
    function, good, bad = DISTRIBUTIONS[name]
    check(Written(function), good, bad=bad)


def asserted(linear, x):
    if not torch.isfinite(x).all():  # an assert, which pytest would word
        raise AssertionError("not finite")
    return linear(x)


def by_async(*words):
    return lambda linear, x: (torch._assert_async((x > -100).all(), *words), linear(x))[1]


RAISING = {
    "assert": (asserted, (X,), (NAN,)),
    "gaussian_nll_loss": (lambda h, x, v: F.gaussian_nll_loss(h(x), x, v), (X, POSITIVE), (X, -POSITIVE)),
    "_assert_async": (by_async("too small"), (X,), (X - 1000,)),
    "_assert_async without words": (by_async(), (X,), (X - 1000,)),
    "_assert": (lambda h, x: (torch._assert((x < 9).all(), "too large"), h(x))[1], (X,), (X + 1000,)),
    "_check": (lambda h, x: (torch._check(bool((x < 9).all()), lambda: "large"), h(x))[1], (X,), (X + 1000,)),
    "in no_grad": (torch.no_grad()(asserted), (X,), (NAN,)),
}


@pytest.mark.parametrize(
    "name",
    sampled(
        [pytest.param(name, marks=ASSERTS) if "async" in name else name for name in RAISING],
        lambda name: name != "_assert_async without words",
    ),
)
def test_checks_that_raise(name):
    function, good, bad = RAISING[name]
    check(Written(function), good, bad=bad)


def masked(linear, x, mask):
    if mask.any():
        x = x.masked_fill(mask, 0.0)
    return linear(x)


def written_after(linear, x):
    """Forward reads the number before the write."""
    y = x * 1
    small = y.max() < 100
    y += 1000
    return linear(y) if small and not (y < 100).all() else y


def lengths(linear, x, counts):
    return torch.stack([linear(x)[:, :n].sum() for n in counts.tolist()])


def by_mask(linear, x, kept):
    return linear(x) if torch.equal(kept, torch.ones_like(kept)) else linear(x) * kept


COUNTS = torch.tensor([1, 3])
BRANCHES = {
    "any": (masked, (X, X > 0), (X, X > 100)),
    "number in the loop": (lengths, (X, COUNTS), (X, COUNTS.flip(0))),
    "read, then written": (written_after, (X,), (X * 1e6,)),
    "equal": (by_mask, (X, ONES), (X, POSITIVE)),
    "allclose": (lambda h, x, y: h(x) if torch.allclose(x, y) else h(y), (X, X + 1e-12), (X, X + 1)),
    "is_nonzero": (lambda h, x, n: h(x) if torch.is_nonzero(n) else x, (X, torch.tensor(2)), (X, torch.tensor(0))),
    "in": (lambda h, x, n: h(x) if 3 in n else x, (X, COUNTS), (X, COUNTS - 1)),
    "int of a float": (lambda h, x, t: h(x) * int(t), (X, torch.tensor(2.5)), (X, torch.tensor(3.5))),
}


@pytest.mark.parametrize("name", sampled(BRANCHES, lambda name: name != "allclose"))
def test_branches(name):
    function, good, other = BRANCHES[name]
    check(Written(function), good, other=other)


def test_another_number_that_decides_the_same_way_is_a_hit():
    check(Written(masked), (X, X > 0))
    _, module = dispatched(Written(masked), X, X > 0)
    module(X, X > 1)
    assert stats(module).hits == 1


VALUES = [0.5, 0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308]


@pytest.mark.parametrize("value", sampled(VALUES, lambda value: value == 0 or math.isnan(value)))
def test_a_float_that_is_moved_and_read_must_be_the_same_bit_by_bit(value):
    at_sample = torch.tensor([1.0, value], dtype=F64)
    _, module = dispatched(Written(lambda h, x, t: h(x) * t[1].item()), X, at_sample)
    for other in VALUES:
        module(X, torch.tensor([2.0, other], dtype=F64))
    assert (stats(module).hits, stats(module).misses.total()) == (1, len(VALUES) - 1), stats(module)


def test_a_float_that_is_computed_and_read_is_refused_with_a_hint():
    with pytest.raises(UnsupportedModule, match=r"(?s)round it otherwise.*h\(x\)\.sum\(\)\.item.*keep it a tensor"):
        dispatched(Written(lambda h, x: x * h(x).sum().item()), X)


def test_the_reason_names_the_line_and_the_numbers():
    _, module = dispatched(Written(masked), X, X > 0)
    module(X, X > 100)
    ((reason, _),) = stats(module).misses.items()
    assert reason.startswith("number read at ") and reason.endswith("compiled for True, called with False")
    assert "test_number_checks.py:" in reason and "if mask.any():" in reason


def test_a_sample_that_eager_refuses_is_refused_in_eagers_words():
    with pytest.raises(AssertionError, match="not finite"):
        dispatched(Written(asserted), NAN)


class Attribute(nn.Module):
    """A plain tensor attribute that selects the branch."""

    def __init__(self):
        super().__init__()
        self.flag = torch.tensor(True)

    def forward(self, x):
        return x * 2 if self.flag else x * 3


def test_a_plain_attribute_changed_in_place():
    module = add_tvm_dispatch(Attribute(), X)
    assert torch.equal(module(X), X * 2)
    module.flag.fill_(False)
    assert torch.equal(module(X), X * 3)
    assert (stats(module).hits, stats(module).misses.total()) == (1, 1)


def dropped(linear, x):
    """A layer that is left out at random, as LayerDrop does; a draw before and one after."""
    x = F.dropout(x, 0.5)
    if torch.rand(()) < 0.5:
        x = linear(x)
    return x


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
def test_a_branch_on_a_draw(on_miss):
    eager, module = dispatched(Written(dropped), X, on_miss=on_miss, whole=True)
    for seed in range(8):
        assert_same(run(module, Call((X,)), seed=seed), run(eager, Call((X,)), seed=seed))
    counted = stats(module)
    if on_miss == "compile":
        assert counted.hits == 8 and {len(entry.readings) for entry in counted.entries} == {1}
    else:
        assert 0 < counted.hits < 8 and counted.hits + counted.misses.total() == 8


def test_on_miss_compile_keeps_an_entry_for_each_branch():
    eager, module = dispatched(Written(lengths), X, COUNTS, on_miss="compile")
    for counts in [[1, 3], [2, 2], [1, 3], [2, 2], [3, 1]]:
        args = X, torch.tensor(counts)
        assert_same(run(module, Call(args)), run(eager, Call(args)))
    assert stats(module).hits == 5 and not stats(module).misses
    assert [entry.readings[0].value for entry in stats(module).entries] == [(1, 3), (2, 2), (3, 1)]


def test_on_miss_compile_adds_nothing_for_a_call_that_raises():
    eager, module = dispatched(Written(asserted), X, on_miss="compile")
    assert outcome(module, (NAN,)) == outcome(eager, (NAN,))
    assert len(stats(module).entries) == 1


def test_the_same_sample_twice_is_one_entry():
    _, module = dispatched(Written(masked), X, X > 0)
    add_tvm_dispatch(module, (X, X > 1))
    assert len(stats(module).entries) == 1
    add_tvm_dispatch(module, (X, X > 100))
    assert len(stats(module).entries) == 2


def halves(linear, x):
    """As sliding windows are counted: a quotient of two sizes is a tensor, whose number is known when it is traced."""
    return linear(x)[: torch.div(x.shape[0] + 1, 2, rounding_mode="trunc")].sum(0)


def test_a_quotient_of_sizes_beside_a_draw():
    eager, module = dispatched(Written(halves), X)
    assert_same(run(module, Call((X,))), run(eager, Call((X,))), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 1


def test_equal_modules_share_what_is_lowered_if_they_read_the_same():
    one, two, three = (dispatched(Written(masked), X, mask)[1] for mask in (X > 0, X > 1, X > 100))
    first, second, third = (stats(module).entries[0].lowered for module in (one, two, three))
    assert first is second and first is not third


def test_reports_name_the_checks():
    eager, module = dispatched(Written(masked), X, X > 0)
    assert "if mask.any()" in str(explain(module).full)
    assert "nothing stands in the way" in str(examine(eager, (X, X > 0)))
    assert lower(eager, (X, X > 0)).check().ok


def mask(size: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(size, dtype=F64)


PADDING = torch.tensor([[False, False, True], [False, False, False]])
S = draw(2, 3, 8)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


TRANSFORMERS = {
    "encoder, causal": (encoder, (S, mask(3)), (S, torch.zeros(3, 3, dtype=F64))),
    "encoder, both": (encoder, (S, mask(3), torch.zeros(2, 3, dtype=F64).masked_fill(PADDING, -math.inf)), None),
    "encoder, eval": (lambda: encoder().eval(), (S, mask(3)), (S, torch.zeros(3, 3, dtype=F64))),
    "transformer": (transformer, (S, draw(2, 4, 8), None, mask(4)), (S, S, None, torch.zeros(3, 3, dtype=F64))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(TRANSFORMERS, ["encoder, causal", "encoder, both"]))
def test_transformers_with_masks(name):
    make, good, other = TRANSFORMERS[name]
    torch.manual_seed(0)
    check(make(), good, other=other)


def with_a_distribution(h, x):
    return D.Normal(h(x), x).entropy()


def with_settings_of_its_own(h, x):
    return D.Normal(h(x), x, validate_args=False).entropy()


def naming_them(h, x):
    return D.Normal(h(x), x).entropy() if x.dim() > 5 else h(x)


@pytest.mark.parametrize("function", [with_a_distribution, with_settings_of_its_own, naming_them])
def test_validation_of_distributions_is_a_switch_of_the_process(function):
    """Dynamo switches it off for good: an entry without the checks is not for a process that validates again."""
    switch, asks = D.Distribution.set_default_validate_args, function is with_a_distribution
    module = Written(function)
    switch(False)
    try:
        add_tvm_dispatch(module.double(), POSITIVE)
    finally:
        switch(True)
    assert "_validate_args" in vars(D.Distribution) and D.Distribution._validate_args is True
    if asks:
        with pytest.raises(ValueError, match="constraint GreaterThan"):
            module(-POSITIVE)
        assert list(stats(module).misses) == ["validation of distributions: compiled for False, called with True"]
    else:
        module(-POSITIVE)
        assert stats(module).hits == 1
