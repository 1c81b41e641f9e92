"""Uses of autograd inside forward: refused by name with the user's line, or captured with eager's numbers."""

import copy
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from bridge import UnsupportedModule, add_tvm_dispatch, examine, stats
from bridge.capture.inplace_rules import InPlaceRules
from tests.bridge.compare import check_module


class WithForward(nn.Module):
    """A linear layer, also held in lists, and a given forward."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.held = list(self.layer.parameters())
        self.hidden = [nn.Linear(3, 1)]
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def of_what_a_list_holds(self, x):
    return torch.autograd.grad(self.layer(x).pow(2).sum(), self.held, create_graph=True)[0].sum()


def of_a_hidden_module(self, x):
    loss = self.hidden[0](x).pow(2).sum()
    return torch.autograd.grad(loss, [*self.hidden[0].parameters()])[0].sum() + self.layer(x)


def by_backward(self, x):
    with torch.enable_grad():
        z = x.clone().requires_grad_(True)
        self.layer(z).sum().backward()
    return z.grad + x


def by_func_grad(self, x):
    return torch.func.grad(lambda t: self.layer(t).tanh().sum())(x)


def by_jvp(self, x):
    return torch.func.jvp(lambda t: self.layer(t).tanh(), (x,), (torch.ones_like(x),))[1]


def by_dual_numbers(self, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(self.layer(forward_ad.make_dual(x, torch.ones_like(x))).tanh()).tangent


def asks_for_gradients(self, x):
    return self.layer(x if self.layer.weight.grad is None else 2 * x)


def drops_gradients(self, x):
    self.layer.zero_grad()
    return self.layer(x)


def sets_gradients(self, x):
    self.layer.weight.grad = torch.zeros_like(self.layer.weight)
    return self.layer(x)


@pytest.mark.parametrize("forward", [asks_for_gradients, drops_gradients])
def test_that_there_is_no_gradient_is_a_condition(forward):
    module, x = WithForward(forward), torch.randn(4, 3)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for each in (module, eager):
        each(x).sum().backward()
        each(x).sum().backward()
        each.zero_grad()
    torch.testing.assert_close(module(x), eager(x))
    module(x).sum().backward(), eager(x).sum().backward()
    torch.testing.assert_close(module.layer.weight.grad, eager.layer.weight.grad)
    assert stats(module).hits == 3 and "'grad'" in " ".join(stats(module).misses)


def packs_what_is_saved(self, x):
    with saved_tensors_hooks(lambda saved: saved / 2, lambda packed: packed):
        return self.layer(x).tanh()


def packs_by_an_object(self, x):
    """Packs by a callable object, which has no name."""
    with saved_tensors_hooks(partial(torch.mul, 0.5), lambda packed: packed):
        return self.layer(x).tanh()


@pytest.mark.parametrize(
    ("forward", "op"),
    [
        (of_a_hidden_module, "torch.autograd.grad or backward|free"),
        (by_backward, "torch.autograd.grad or backward"),
        (by_func_grad, "torch.func"),
        (by_jvp, "torch.func"),
        (by_dual_numbers, "torch.func"),
        (sets_gradients, "Tensor.grad"),
        (packs_what_is_saved, "saved_tensors_hooks"),
        (packs_by_an_object, "saved_tensors_hooks"),
    ],
)
def test_is_refused_with_the_users_line(forward, op):
    module, x = WithForward(forward), torch.randn(4, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = set(vars(module))
    module(x)  # eager has nothing against it
    module.zero_grad()
    with pytest.raises(UnsupportedModule, match=op) as raised:
        add_tvm_dispatch(module, x)
    problem = raised.value.ops[0]
    assert f"{__file__}:" in problem.where
    assert [each.op for each in examine(module, x).unsupported] == [each.op for each in raised.value.ops]
    assert set(vars(module)) == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_what_another_thread_runs_for_a_waiting_one_has_the_latters_line():
    """As in autograd's thread of a GPU, which has none of the user's frames."""
    rules = InPlaceRules([], [])
    thread = threading.Thread(target=rules.complain, args=("backward", "inside forward"))
    thread.start()
    thread.join()
    assert [each.where.startswith(f"{__file__}:") for each in rules.unsupported] == [True]


def gradient_step(self, x):
    """MAML's inner step: a derivative with respect to the parameters, differentiated again."""
    weights = dict(self.layer.named_parameters())
    loss = self.layer(x).pow(2).mean()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(self.layer, moved, (x,))


def saves_elsewhere(self, x):
    with save_on_cpu():
        return self.layer(x).tanh()


@pytest.mark.parametrize("forward", [gradient_step, saves_elsewhere, of_what_a_list_holds])
def test_is_captured_with_eagers_numbers(forward):
    check_module(partial(WithForward, forward), lambda: torch.randn(4, 3))


def test_a_sample_that_eager_refuses_is_refused_in_eagers_words():
    module = WithForward(lambda self, x: torch.autograd.grad(self.layer(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match="does not require grad") as raised:
        add_tvm_dispatch(module, torch.randn(4, 3))
    assert not isinstance(raised.value, UnsupportedModule)


def test_a_call_that_misses_computes_it_in_eager():
    module = WithForward(by_func_grad)
    module.run = lambda self, x: by_func_grad(self, x) if len(x) > 3 else self.layer(x)
    add_tvm_dispatch(module, torch.randn(3, 3), on_miss="compile")
    x = torch.randn(4, 3)
    assert torch.equal(module(x), module.forward(x))
    assert stats(module).hits == 0


def test_a_leaf_that_forward_makes_beside_parameters_takes_a_gradient_that_nobody_sees():
    def forward(self, x):
        rows = x[:, None]
        rows.requires_grad = True  # as wav2vec2's encoder does, so that checkpoints have a gradient
        return self.layer(rows.tanh()).squeeze(1)

    check_module(lambda: WithForward(forward), lambda: torch.randn(4, 3), calls=1)


def test_a_leaf_that_alone_makes_a_result_require_grad_is_refused():
    def forward(self, x):
        return self.layer(x), x.detach().clone().requires_grad_() * 2

    with pytest.raises(UnsupportedModule, match="requires grad by itself"):
        add_tvm_dispatch(WithForward(forward), torch.randn(4, 3))


class Recomputed(torch.autograd.Function):
    """A checkpoint of a user's own: its backward runs a layer again, whose parameters get gradients there."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.layer(x)
        torch.autograd.backward([y], [grad])
        return x.grad, None


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return Recomputed.apply(self.first(x).sin(), self.second)


LOOKS = {
    "sample": lambda module, x: add_tvm_dispatch(module, x),
    "parts": lambda module, x: add_tvm_dispatch(module, x, whole=False),
    "no sample": lambda module, x: add_tvm_dispatch(module),
    "examine": lambda module, x: examine(module, x),
}


@pytest.mark.parametrize("had", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("look", LOOKS)
def test_gradients_are_as_they_were_and_then_eagers(look, had):
    torch.manual_seed(0)
    eager, x = Checkpointed().double(), torch.randn(3, 4, dtype=torch.float64)
    module = copy.deepcopy(eager)
    for each in (*eager.parameters(), *module.parameters()):
        each.grad = torch.full_like(each, 2.0) if had else None
    before = [each.grad for each in module.parameters()]
    with pytest.raises(UnsupportedModule, match="runs a backward inside") if look == "sample" else nullcontext():
        LOOKS[look](module, x)
    for each, then in zip(module.parameters(), before, strict=True):
        assert each.grad is then and (then is None or bool((then == 2.0).all()))
    for _ in range(3):
        for each in (module, eager):
            each(x).square().sum().backward()
        for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
