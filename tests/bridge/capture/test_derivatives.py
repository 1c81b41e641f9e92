"""Derivatives that forward takes of itself: compiled with eager's numbers, or refused by name."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.export import Dim
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, save_compiled, stats
from tests.bridge.compare import check_module

WIDTH = 3


class Field(nn.Module):
    """Small networks, and a given forward."""

    def __init__(self, forward, act=nn.Tanh):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.act, self.drop, self.run = act(), nn.Dropout(0.3), forward

    def net(self, x):
        return self.last(self.act(self.first(x)))

    def normed(self, x):
        return self.last(self.act(self.norm(self.first(x))))

    def forward(self, x, shift=None):
        return self.run(self, x) if shift is None else self.run(self, x, shift)


def leaf(x):
    return x.detach().requires_grad_()


def residual(self, x):
    """Of a physics-informed network: first and second derivatives."""
    x = leaf(x)
    u = self.net(x)
    (slope,) = grad(u.sum(), x, create_graph=True)
    (curve,) = grad(slope[:, 0].sum(), x, create_graph=True)
    return u, slope[:, 1] - curve[:, 0]


def third(self, x):
    x = leaf(x)
    y = self.net(x)
    for _ in range(3):
        (y,) = grad(y.sum(), x, create_graph=True)
    return y


def normed(self, x):
    x = leaf(x)
    return grad(self.normed(x).sum(), x, create_graph=True)


def penalty(self, x):
    """Of a critic, with a random point between two."""
    share = torch.rand(len(x), 1).to(x)
    between = (share * x + (1 - share) * x.flip(0)).detach().requires_grad_()
    scores = self.normed(between)
    (slope,) = grad(scores, between, torch.ones_like(scores), create_graph=True)
    return self.normed(x).mean() + (slope.norm(dim=1) - 1).square().mean()


def trace(self, x):
    """Hutchinson's estimate."""
    x = leaf(x)
    y = torch.tanh(self.first(x)) @ self.first.weight
    noise = torch.randn_like(x)
    return (grad(y, x, noise, create_graph=True)[0] * noise).sum(1)


def dropped(self, x):
    """Both derivatives have the same mask."""
    z = leaf(x)
    y = self.last(self.drop(torch.tanh(self.first(z))))
    return y, grad(y.sum(), z, create_graph=True)[0], self.drop(self.first(x))


def of_an_intermediate(self, x):
    h = self.first(x)
    y = self.last(self.act(h))
    return y, grad(y.sum(), h, create_graph=True)[0] * h


def several(self, x):
    x = leaf(x)
    z, unused = x * 2, leaf(x)
    y, w = self.net(z), torch.tanh(z)
    a, b, c = grad([y, w], [x, z, unused], [torch.ones_like(y), w], create_graph=True, allow_unused=True)
    d, e = grad(y.sum(), [x, unused], create_graph=True, materialize_grads=True)
    return a, b, c, d, e.sum() + y


def of_parameters(self, x):
    """Steps of MAML."""
    weight, bias = self.first.weight, self.first.bias
    for _ in range(2):
        loss = F.linear(x, weight, bias).tanh().square().mean()
        slopes = grad(loss, [weight, bias], create_graph=True)
        weight, bias = weight - 0.1 * slopes[0], bias - 0.1 * slopes[1]
    return F.linear(x, weight, bias)


def of_first_order(self, x):
    """The same, whose slopes are constants."""
    weight = self.first.weight
    for _ in range(2):
        weight = weight - 0.1 * grad(F.linear(x, weight).tanh().square().mean(), weight)[0]
    return F.linear(x, weight)


def langevin(self, x):
    """Steps of a sampler, whose derivatives are constants, then an energy."""
    z = x
    for _ in range(5):
        z = leaf(z)
        z = z - 0.1 * grad(self.net(z).square().sum(), z)[0] + 0.01 * torch.randn_like(z)
    return self.net(z.detach())


def one_kept(self, x):
    z = leaf(x)
    y = self.net(z)
    (slope,) = grad(y.sum(), z, retain_graph=True)
    return y, self.net(x + slope)


def with_modes(self, x):
    with torch.no_grad():
        scale = self.net(x)
    with torch.enable_grad():
        x = leaf(x)
        (slope,) = grad((self.net(x) * scale).sum(), x, create_graph=True)
    with torch.no_grad():
        norm = slope.norm()
    return slope / norm


def convolved(self, x):
    """``convolution_backward`` returns ``None`` in the place of gradients that are not used."""
    x = leaf(x)
    y = F.conv1d(x.unsqueeze(0), self.first.weight.unsqueeze(-1).expand(-1, -1, 2), padding=1).tanh()
    return y, grad(y.sum(), x, create_graph=True)[0]


def by_hand(self, x):
    """A mean and a buffer, of which autograd does not follow the former."""
    y, mean, _ = torch.native_layer_norm(self.first(x), [6], None, None, 1e-5)
    z, buffer = torch.ops.aten.log_sigmoid_forward(self.first(x))  # the buffer is empty on a GPU
    return y + mean, z + buffer.sum()


def jacobian(self, x):
    return torch.autograd.functional.jacobian(lambda t: self.net(t).sum(0), x, create_graph=True)


FORMS = (residual, third, normed, penalty, trace, dropped, of_an_intermediate, several, of_parameters, of_first_order)
FORMS += (langevin, one_kept, with_modes, by_hand, jacobian)


@pytest.mark.composes(
    "`autograd.grad` in forward: PINNs, force fields, gradient penalties, score models, MAML",
    "compiled, and differentiated again in training; by `torch.func`: refused by name",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("follows", [False, True])
def test_forms(form, follows):
    check_module(partial(Field, form), lambda: torch.randn(4, WIDTH).requires_grad_(follows))


def test_a_convolution():
    check_module(partial(Field, convolved), lambda: torch.randn(WIDTH, 5))


@pytest.mark.parametrize("act", [nn.ELU, nn.GELU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.SiLU, nn.Softplus])
def test_activations(act):
    check_module(partial(Field, residual, act), lambda: torch.randn(4, WIDTH))


POINTS = torch.tensor([0.0, -0.0, 1, -1, 3, -3, 0.5, -0.5, 20, -20, 800, -800], dtype=torch.float64)
POINTWISE = (F.elu, F.gelu, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish, F.relu6, F.silu, F.softplus)
REDUCING = (partial(F.huber_loss, target=-POINTS), partial(F.smooth_l1_loss, target=-POINTS), F.glu)
REDUCING += (partial(F.prelu, weight=POINTS[2:3]), partial(F.layer_norm, normalized_shape=[12]))
REDUCING += (partial(F.binary_cross_entropy_with_logits, target=POINTS.sigmoid()), partial(F.softmax, dim=0))


@pytest.mark.parametrize("function", [*POINTWISE, *REDUCING])
def test_second_derivatives_at_kinks_and_far_away(function):
    """Autograd's formula of a derivative may differ there from the derivative of its parts."""

    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, x):
            x = leaf(x)
            y = function(x * self.weight)
            return grad(y, x, torch.linspace(0.5, 1.5, y.numel()).to(y).reshape(y.shape), create_graph=True)[0]

    check_module(Slope, lambda: POINTS.clone())


@pytest.mark.parametrize("form", [normed, penalty, of_an_intermediate, langevin, residual])
def test_differentiated_once_more(form):
    module, x = Field(form).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    found = []
    for each in (module, eager):
        torch.manual_seed(1)
        made = each(x)
        wanted = [*each.first.parameters(), *each.last.parameters()]
        loss = sum(y.square().sum() for y in (made if isinstance(made, tuple) else (made,)))
        slopes = [each for each in grad(loss, wanted, create_graph=True, allow_unused=True) if each is not None]
        again = grad(sum(slope.square().sum() for slope in slopes), wanted, allow_unused=True)
        found.append([*slopes, *(torch.zeros(()) if each is None else each for each in again)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 1


def test_under_autocast():
    def form(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return residual(self, x)

    check_module(partial(Field, form), lambda: torch.randn(64, WIDTH), dtype=torch.float32)


def test_for_all_sizes():
    module, x = Field(residual).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (x,), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    for count in (4, 7):
        x = torch.randn(count, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(module(x), eager(x), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 2


# The positions are an argument, on which forward turns ``requires_grad`` on.


def force(self, x, shift=None):
    x.requires_grad_(True)
    energy = self.net(x if shift is None else x + shift).sum()
    return energy, -grad(energy, x, create_graph=True)[0]


def steps(module, *tensors):
    for parameter in module.parameters():
        parameter.grad = None
    energy, forces = module(*tensors)
    (energy + forces.square().sum()).backward()
    return [energy, forces, module.first.weight.grad, *(each.grad for each in tensors if each.is_leaf)]


def beside(module, eager, *makes):
    """A step of both on equal tensors, each made by a function."""
    ours, theirs = ([make() for make in makes] for _ in range(2))
    found = [steps(module, *ours), steps(eager, *theirs)]
    assert [each is None for each in found[0]] == [each is None for each in found[1]]
    torch.testing.assert_close(*([each for each in some if each is not None] for some in found), rtol=1e-10, atol=1e-12)
    assert [each.requires_grad for each in ours] == [each.requires_grad for each in theirs]
    return ours


@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("follows", [False, True])
def test_an_argument_that_forward_follows(count, follows):
    numbers = torch.randn(4, WIDTH, dtype=torch.float64)
    module = Field(force).double()
    eager = copy.deepcopy(module)
    sample = numbers.clone().requires_grad_(follows)
    options = {} if count is None else {"dynamic_shapes": {"x": {0: Dim.DYNAMIC}}}
    add_tvm_dispatch(module, (sample,), **options)
    assert sample.requires_grad == follows
    (x,) = beside(module, eager, numbers.clone)
    assert x.requires_grad
    x.grad = None
    beside(module, eager, lambda: numbers.clone().requires_grad_())
    beside(module, eager, lambda: numbers.clone().requires_grad_() * 2)
    if count:
        beside(module, eager, lambda: torch.cat([numbers, numbers]))
    assert stats(module).hits == 3 + bool(count)


def test_an_argument_that_is_given_twice_is_eagers():
    module, numbers = Field(force).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (numbers.clone(), numbers.clone()))
    beside(module, eager, numbers.clone, numbers.clone)
    assert stats(module).hits == 1
    ours, theirs = numbers.clone(), numbers.clone()
    torch.testing.assert_close(steps(module, ours, ours), steps(eager, theirs, theirs))
    assert stats(module).hits == 1 and "twice" in " ".join(stats(module).misses)


def test_it_cannot_be_saved(tmp_path):
    module = Field(force)
    add_tvm_dispatch(module, torch.randn(4, WIDTH))
    with pytest.raises(UnsupportedModule, match="requires_grad of arguments"):
        save_compiled(module, tmp_path / "saved")


def test_sizes_that_are_found_to_vary():
    module = Field(force).double()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module)
    for count in (4, 5, 6):
        numbers = torch.randn(count, WIDTH, dtype=torch.float64)
        beside(module, eager, numbers.clone)
    assert stats(module).hits == 3


# Refusals


def many_at_once(self, x):
    x = leaf(x)
    y = self.net(x)
    return grad(y, x, torch.eye(y.numel()).reshape(-1, *y.shape), is_grads_batched=True)[0]


def follows_late(self, x):
    doubled = x * 2
    x.requires_grad_(True)
    return grad(self.net(x).sum() + doubled.sum(), x)[0]


def follows_if(self, x):
    if not x.requires_grad:
        x.requires_grad_(True)
    return grad(self.net(x).sum(), x)[0]


def follows_for_a_while(self, x):
    x.requires_grad_(True)
    slope = grad(self.net(x).sum(), x)[0]
    x.requires_grad_(False)
    return slope


def writes(self, x):
    x = leaf(x)
    h = self.first(x)
    h.mul_(h.tanh())
    return grad(self.last(h).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (many_at_once, "is_grads_batched"),
        (follows_late, "requires_grad_"),
        (follows_if, "requires_grad_"),
        (follows_for_a_while, "requires_grad_"),
        (writes, "values that operators have saved"),
    ],
)
def test_is_refused_by_name(form, words):
    module, x = Field(form), torch.randn(4, WIDTH)
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(module, x)
    assert not x.requires_grad


def test_evaluation_of_a_force_field():
    def form(self, x):
        with torch.enable_grad():
            x = leaf(x)
            energy = self.net(x).sum()
            (slope,) = grad(energy, x, create_graph=self.training)
        return energy.detach(), slope

    module, x = Field(form).double().eval(), torch.randn(4, WIDTH, dtype=torch.float64)
    eager = copy.deepcopy(module)
    with torch.no_grad():
        add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), eager(x), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 1


# Derivatives whose graph leads out of the call are eager's.


def of_arguments(self, x, y):
    found = grad(self.net(y).square().sum() + x.sum(), x, create_graph=True, retain_graph=True)[0]
    return found * y, self.net(x)


def of_its_weights(self, x):
    return grad(self.net(x).square().sum(), [*self.first.parameters()], create_graph=True, retain_graph=True)


@pytest.mark.parametrize(
    ("form", "make"),
    [
        (of_arguments, lambda module, x: (x, x)),
        (of_arguments, lambda module, x: (x, x * 2)),
        (of_its_weights, lambda module, x: (module.first(x)[:, :WIDTH].contiguous(),)),
        (force, lambda module, x: (_hooked(x),)),
    ],
)
@pytest.mark.parametrize("is_sample", [False, True])
def test_a_graph_that_leads_out_of_the_call(form, make, is_sample):
    def numbers():
        return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()

    module = Field(form).double()
    eager = copy.deepcopy(module)
    given = make(module, numbers())
    if is_sample:
        with pytest.raises(UnsupportedModule, match=r"takes (a derivative|derivatives)"):
            add_tvm_dispatch(module, given)
        return
    add_tvm_dispatch(module, tuple(numbers() for _ in given))
    found = []
    for each in (module, eager):
        made = each(*make(each, numbers()))
        found.append([*made, *grad(sum(y.square().sum() for y in made), each.first.weight)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 0 and "derivative" in " ".join(stats(module).misses)


def _hooked(x):
    x.register_hook(lambda slope: slope * 2)
    return x
