"""Modules whose first call differs: eager runs it, and later calls are compiled."""

import copy

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.sampling import sampled


class _Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.started = False
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        started, self.started = self.started, True
        return self.later(x) if started else self.first(x)

    def later(self, x):
        return (x - self.mean) * self.weight


class StartsABuffer(_Once):
    """A moving mean that begins with the first batch's."""

    def first(self, x):
        self.mean.copy_(x.detach().mean(0))
        return self.later(x)

    def later(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().later(x)


class StartsAParameter(_Once):
    """An ActNorm's scale, set from the first batch."""

    def first(self, x):
        with torch.no_grad():
            self.weight.copy_(1 / x.std(0))
        return self.later(x)


class AnotherFormula(_Once):
    def first(self, x):
        return self.later(x) * 2


class AnotherNumber(_Once):
    def __init__(self):
        super().__init__()
        self.scale = 3.0

    def first(self, x):
        self.scale = 1.5
        return self.later(x) * 3.0

    def later(self, x):
        return super().later(x) * self.scale


class DrawsOnce(_Once):
    def first(self, x):
        return self.later(x + torch.rand_like(x))


class DropsLater(_Once):
    def first(self, x):
        return super().later(x)

    def later(self, x):
        return torch.dropout(super().later(x), 0.5, True)


class TheSame(_Once):
    """Only sets an attribute: a clipped window."""

    def first(self, x):
        return self.later(x)


class Flagged(_Once):
    """Its flag is a buffer, which goes into the checkpoint, as an ActNorm's or a codebook's."""

    def __init__(self):
        super().__init__()
        del self.started
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x):
        if not self.started:
            self.first(x)
            self.started.fill_(True)
        return self.later(x)


class FlaggedBuffer(Flagged, StartsABuffer):
    """Its mean begins with the first batch's."""


class ReplacedFlag(FlaggedBuffer):
    def forward(self, x):
        if not self.started:
            self.first(x)
            self.started = torch.tensor(True)
        return self.later(x)


class FlaggedParameter(Flagged, StartsAParameter):
    """Its weight begins with the first batch's mean."""


OTHERS = [StartsABuffer, StartsAParameter, AnotherFormula, AnotherNumber, DrawsOnce, DropsLater]


def trained(module, calls=4):
    """Results, gradients and buffers of some calls, and the generator's state behind them."""
    found = []
    torch.manual_seed(3)
    for call in range(calls):
        x = torch.randn(6, 4, dtype=torch.float64) * (call + 1)
        y = module(x)
        module.zero_grad()
        y.sum().backward()
        found += [
            y.detach(),
            module.weight.grad.clone(),
            *(each.detach().clone() for each in module.state_dict().values()),
        ]
    return [*found, torch.get_rng_state().double()]


@pytest.mark.composes(
    "code that forward runs once, at its first call",
    "the first call is eager's, later ones hit; also with a sample",
    section="Guards",
)
@pytest.mark.parametrize("kind", OTHERS)
def test_the_first_call_is_eagers(kind):
    module = kind()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module)
    for ours, theirs in zip(trained(module), trained(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3 and module.started is True


@pytest.mark.parametrize("kind", sampled(OTHERS, [StartsABuffer, DropsLater]))
def test_of_a_sample_later_calls_are_compiled(kind):
    module = kind()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
    assert module.started is False
    for ours, theirs in zip(trained(module), trained(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    (reason,) = stats(module).misses  # of several attributes, the first that the guard finds changed
    told = ["attribute 'started'", *["attribute 'scale'"] * (kind is AnotherNumber)]
    assert stats(module).hits == 3 and any(map(reason.count, told))


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("kind", [FlaggedBuffer, ReplacedFlag, FlaggedParameter])
def test_a_flag_may_be_a_buffer(kind, sample):
    module = kind()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, *([(torch.randn(6, 4, dtype=torch.float64),)] if sample else []))
    assert not module.started
    for ours, theirs in zip(trained(module), trained(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3


@pytest.mark.parametrize("kind", sampled(OTHERS, [StartsABuffer, DrawsOnce]))
def test_after_the_first_call_it_may_be_added(kind):
    """Also where another module's lowering is reused."""
    for _ in range(2):
        module = kind()
        eager = copy.deepcopy(module)
        for each in (module, eager):
            torch.manual_seed(1)
            each(torch.randn(6, 4, dtype=torch.float64))
        add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
        for ours, theirs in zip(trained(module), trained(eager), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert stats(module).hits == 4
    fresh = add_tvm_dispatch(kind(), (torch.randn(6, 4, dtype=torch.float64),))
    trained(fresh, calls=1)
    assert stats(fresh).hits == 0  # the entry for later calls does not serve a first one


def test_an_attribute_that_changes_nothing_is_set_by_the_sample():
    module = TheSame()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
    for ours, theirs in zip(trained(module), trained(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 4


class Kept(nn.Module):
    """A graph's normalized edges, made once: tensors in a tuple, whose methods are called."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(4, dtype=torch.float64)), None

    def forward(self, x):
        kept = self.kept
        if kept is None:
            kept = self.kept = (torch.arange(4.0, dtype=x.dtype), x.detach().abs().amax(0) + 1)
        return x * self.weight / kept[0].add(1) * kept[1].sqrt()


class KeptBuffer(Kept):
    def __init__(self):
        super().__init__()
        del self.kept
        self.register_buffer("kept", None, persistent=False)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.ones(4, 4, dtype=x.dtype).tril()
        return x * self.weight @ self.kept * self.scale


@pytest.mark.parametrize("kind", [Kept, KeptBuffer])
def test_tensors_that_the_first_call_keeps(kind):
    module, eager = kind(), kind()
    add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
    assert module.kept is None
    for ours, theirs in zip(trained(module), trained(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3
    assert any("compiled for a tensor, called with None" in each for each in stats(module).misses)
    assert [name for name, _ in module.named_buffers()] == [name for name, _ in eager.named_buffers()]


def test_a_kept_tensor_that_has_got_a_method_of_its_own_is_a_miss():
    module, x = Kept(), torch.randn(6, 4, dtype=torch.float64)
    module(x)
    add_tvm_dispatch(module, (x,))
    module.kept[0].add = lambda other: torch.full((4,), 7.0, dtype=torch.float64)
    torch.testing.assert_close(module(x), x * module.weight / 7 * module.kept[1].sqrt())
    assert stats(module).hits == 0


class Switches(Kept):
    """A codebook's ``requires_grad_()``, or a weight that one of two uses is not to train."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        if self.how == "a buffer":
            self.scale.requires_grad_()
            return x * self.weight * self.scale
        y = x * self.weight
        self.weight.requires_grad = False
        y = y.sin() * self.weight
        if self.how == "to and fro":
            self.weight.requires_grad = True
        return y


def test_a_buffer_that_the_first_call_follows():
    module, eager = Switches("a buffer"), Switches("a buffer")
    with pytest.raises(UnsupportedModule, match=r"buffer .scale.: forward sets requires_grad of it"):
        add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
    assert not module.scale.requires_grad
    add_tvm_dispatch(module)
    for ours, theirs in zip(trained(module), trained(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(module.scale.grad, eager.scale.grad)
    assert stats(module).hits == 3


@pytest.mark.parametrize("how", ["off", "to and fro"])
def test_a_parameter_that_is_followed_in_a_part_of_forward_is_refused(how):
    """Adding leaves it as it was."""
    module = Switches(how)
    with pytest.raises(UnsupportedModule, match="requires_grad"):
        add_tvm_dispatch(module, (torch.randn(6, 4, dtype=torch.float64),))
    assert module.weight.requires_grad


class RingBuffer(nn.Module):
    """Keys enter a queue at a position that moves on at each call, as MoCo's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(4, 30, dtype=torch.float64))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        keys = x * self.weight
        scores = keys @ self.queue.clone()
        with torch.no_grad():
            begin = int(self.position)
            self.queue[:, begin : begin + 6] = keys.T
            self.position[0] = (begin + 6) % 30
        return scores + keys.sum()


@pytest.mark.parametrize("sample", [True, False])
def test_a_position_that_moves_on_is_no_flag(sample):
    """The first and the last position have entries of their own; one entry takes all others."""
    module = RingBuffer()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, *([(torch.randn(6, 4, dtype=torch.float64),)] if sample else []), on_miss="compile")
    for ours, theirs in zip(trained(module, 12), trained(eager, 12), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 12 and len(stats(module).entries) == 3
