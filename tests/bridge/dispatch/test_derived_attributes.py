"""Old weight_norm, spectral_norm and prune inside a dispatched module: their hooks set attributes in every call."""

import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm

from bridge import UnsupportedModule, add_tvm_dispatch, examine, remove_tvm_dispatch, stats
from tests.sampling import sampled, spread

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", amount=0.3)


def pruned_twice(layer):
    prune.random_unstructured(layer, "weight", 0.3)
    return prune.ln_structured(layer, "weight", 0.3, n=2, dim=0)


def weight_and_bias(layer):
    return weight_norm(weight_norm(layer), "bias", None)


def three_iterations(layer):
    return spectral_norm(layer, n_power_iterations=3, dim=1)


def remove_prune(layer):
    prune.remove(layer, "weight")


EAGER_IS_INEXACT = pytest.mark.cpu("eager's weight_norm of float64 is as exact as float32 on a GPU")
NORMED, NORMED_TWICE = (pytest.param(norm, marks=EAGER_IS_INEXACT) for norm in (weight_norm, weight_and_bias))
NORMS = [NORMED, NORMED_TWICE, spectral_norm, three_iterations, pruned, pruned_twice]
REMOVED = [
    pytest.param(weight_norm, remove_weight_norm, marks=EAGER_IS_INEXACT),
    (spectral_norm, remove_spectral_norm),
    (pruned, remove_prune),
]


class Net(nn.Module):
    """The normed layer is called twice: eager iterates and sets its weight twice."""

    def __init__(self, norm=weight_norm):
        super().__init__()
        self.a, self.b = norm(nn.Linear(6, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.a(self.a(x).tanh()))


def pair(make):
    """Two equal modules in float64; copies cannot be made: the weight has a graph."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make().double())
    return modules


def rows():
    return torch.randn(4, 6, dtype=torch.float64)


def same(one, other):
    assert (one.dtype, one.requires_grad, type(one)) == (other.dtype, other.requires_grad, type(other))
    assert (one.grad_fn is None) == (other.grad_fn is None)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def same_state(one, other):
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        same(value, other.state_dict()[name])


def train(modules, x, layer, steps=5):
    """Steps whose loss has a term of the weight that the call left."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    for _ in range(steps):
        losses = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(x).square().mean() + 0.1 * layer(module).weight.square().sum())
            losses[-1].backward()
            optimizer.step()
        same(*losses)
        same(*(layer(module).weight for module in modules))
        same_state(*modules)


@pytest.mark.composes("hooks on modules inside")
@pytest.mark.parametrize("norm", sampled(NORMS, spread(NORMS)))
def test_training_is_eagers_and_leaves_eagers_weight(norm):
    modules, x = pair(lambda: Net(norm)), rows()
    before = modules[1].a.weight
    add_tvm_dispatch(modules[1], x)
    assert modules[1].a.weight is before
    train(modules, x, lambda module: module.a)
    assert stats(modules[1]).hits == 5
    assert not stats(modules[1]).misses


CONVOLUTIONS = [
    pytest.param(conv, *given.values, marks=given.marks)
    for conv in (nn.Conv1d, nn.ConvTranspose1d)
    for given in (NORMED, pytest.param(spectral_norm))
]


@pytest.mark.parametrize(
    ("conv", "norm"), sampled(CONVOLUTIONS, [(nn.Conv1d, weight_norm), (nn.ConvTranspose1d, spectral_norm)])
)
def test_a_convolution(norm, conv):
    modules = pair(lambda: nn.Sequential(norm(conv(3, 4, 3)), nn.LeakyReLU(0.1)))
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    add_tvm_dispatch(modules[1], x)
    train(modules, x, lambda module: module[0])
    assert stats(modules[1]).hits == 5


@pytest.mark.parametrize("norm", sampled([NORMED, spectral_norm, pruned], [spectral_norm]))
def test_in_every_mode(norm):
    modules, x = pair(lambda: Net(norm)), rows()
    add_tvm_dispatch(modules[1], x, on_miss="compile")
    for context in (torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16), nullcontext):
        for training in (True, False):
            with context():
                results = [module.train(training)(x) for module in modules]
                weights = [module.a.weight for module in modules]
            if results[0].dtype == torch.float64:
                same(*results)
            same(*weights)
            same_state(*modules)
    assert stats(modules[1]).hits == 8


def test_two_calls_before_one_backward():
    """A discriminator's: the second call moves the buffers that the first one's weight was made of."""
    modules, x, y = pair(lambda: Net(spectral_norm)), rows(), rows()
    add_tvm_dispatch(modules[1], x)
    gradients = []
    for module in modules:
        first, kept = module(x), module.a.weight
        (first.mean() - module(y).mean() + kept.norm() * module.a.weight.norm()).backward()
        gradients.append(module.a.weight_orig.grad)
    same(*gradients)
    assert stats(modules[1]).hits == 2


@pytest.mark.parametrize(("norm", "remove"), REMOVED)
def test_made_permanent_afterwards(norm, remove):
    modules, x = pair(lambda: Net(norm)), rows()
    add_tvm_dispatch(modules[1], x)
    train(modules, x, lambda module: module.a, steps=2)
    saved = io.BytesIO()
    torch.save(modules[1].state_dict(), saved)
    saved.seek(0)
    modules[0].load_state_dict(torch.load(saved))
    for module in modules:
        remove(module.a)
    same(*(module.a.weight for module in modules))
    same(*(module(x) for module in modules))
    assert stats(modules[1]).hits == 2
    assert len(stats(modules[1]).misses) == 1
    remove_tvm_dispatch(modules[1])
    same_state(*modules)


def test_a_changed_setting_is_a_miss():
    modules, x = pair(lambda: Net(spectral_norm)), rows()
    add_tvm_dispatch(modules[1], x)
    for module in modules:
        next(iter(module.a._forward_pre_hooks.values())).n_power_iterations = 4
    same(*(module(x) for module in modules))
    assert stats(modules[1]).hits == 0


NEW = [
    pytest.param(parametrizations.weight_norm, marks=EAGER_IS_INEXACT),
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
]


@pytest.mark.parametrize("norm", sampled(NEW, [parametrizations.weight_norm, parametrizations.orthogonal]))
def test_parametrizations_are_modules(norm):
    modules, x = pair(lambda: Net(norm)), rows()
    add_tvm_dispatch(modules[1], x)
    train(modules, x, lambda module: module.a, steps=2)
    assert stats(modules[1]).hits == 2


class AsksEarly(Net):
    def forward(self, x):
        return self.b(self.a(x)) if isinstance(self.a.weight, torch.Tensor) else x


class Frozen(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x)
        return self.b(x)


class Unused(Net):
    def forward(self, x):
        return self.b(x)


class Sets(Net):
    def forward(self, x):
        x = self.a(x)
        self.a.weight = x
        return self.b(x)


class Moves(Net):
    def __init__(self):
        super().__init__(spectral_norm)

    def forward(self, x):
        x = self.a(x)
        self.a.weight_u.mul_(2)
        return self.b(x)


@pytest.mark.cpu("eager's weight_norm of float64 is as exact as float32 on a GPU")
@pytest.mark.parametrize("make", [AsksEarly, Frozen, Unused, Sets, Moves])
def test_whatever_forward_does_with_them(make):
    modules, x = pair(make), rows()
    add_tvm_dispatch(modules[1], x)
    for _ in range(2):
        results = [module(x) for module in modules]
        for module, result in zip(modules, results, strict=True):
            module.zero_grad()
            result.square().mean().backward()
        same(*results)
        same(*(module.a.weight for module in modules))
        for one, other in zip(*(module.parameters() for module in modules), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                same(one.grad, other.grad)
        same_state(*modules)
    assert stats(modules[1]).hits == 2


@pytest.mark.cpu("eager's weight_norm of float64 is as exact as float32 on a GPU")
def test_on_the_dispatched_module_itself():
    modules, x = pair(lambda: weight_norm(nn.Linear(6, 3))), rows()
    add_tvm_dispatch(modules[1], x)
    train(modules, x, lambda module: module, steps=2)
    assert stats(modules[1]).hits == 2


def test_weights_that_are_kept_elsewhere_too_are_refused():
    (_, module), x = pair(lambda: nn.Sequential(weight_norm(nn.LSTM(6, 3), "weight_hh_l0"))), rows()
    before = [dict(vars(each)) for each in module.modules()]
    with pytest.raises(UnsupportedModule, match=r"weight_hh_l0: Python state that forward changes at every call"):
        add_tvm_dispatch(module, x)
    assert examine(module, x).unsupported
    for each, then in zip(module.modules(), before, strict=True):
        assert vars(each).keys() == then.keys()
        assert all(vars(each)[name] is value for name, value in then.items())
