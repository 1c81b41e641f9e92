"""Gradients that are differentiated again or batched: eager's numbers, draws, buffers and errors, counted by name."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge import add_tvm_dispatch, explain, stats
from bridge.dynamo import tvm_dispatch
from tests.bridge.compare import Function
from tests.bridge.dispatch.test_autograd import pair, rows
from tests.bridge.models import MLP, TwoOutputs
from tests.device import DEVICE, moved

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
STEPS = 20


def close(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def trained(module, step):
    """The losses of some steps with a module, and its state afterwards."""
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(module)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, dict(module.state_dict())


def trained_alike(module, sample, step):
    """Trains a dispatched copy beside the module; returns it."""
    module = moved(module.double())
    dispatched = add_tvm_dispatch(copy.deepcopy(module), sample)
    close(trained(dispatched, step), trained(module, step))
    return dispatched


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


@pytest.mark.composes(
    "`create_graph=True`: gradient penalties, PINNs, MAML, Hessian-vector products",
    "works: the backward is computed by eager's operators from the call's own draws, and counted",
    section="Autograd, memory, threads",
)
def test_a_gradient_penalty_with_dropout_and_batch_statistics():
    """WGAN-GP's critic: each backward of the penalty meets the masks of its own call; running statistics move once."""
    critic = nn.Sequential(
        nn.Linear(4, 9, bias=False), nn.BatchNorm1d(9), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(9, 1)
    )

    def step(critic):
        real, fake = numbers(6, 4), numbers(6, 4)
        between = (real + torch.rand(6, 1, dtype=torch.float64, device=DEVICE) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()

    dispatched = trained_alike(critic, numbers(6, 4).requires_grad_(), step)
    add = stats(dispatched)
    assert add.hits == STEPS
    (reason,) = add.eager_backwards
    assert "create_graph=True" in reason and add.eager_backwards[reason] == STEPS
    assert (
        reason in repr(add)
        and reason in str(explain(dispatched))
        and "create_graph=True" in explain(dispatched)._repr_html_()
    )


@pytest.mark.composes("`create_graph=True`: gradient penalties, PINNs, MAML, Hessian-vector products")
def test_a_physics_informed_network():
    """u_t = u_xx: two derivatives by the inputs, then one of the loss by the parameters."""

    def step(network):
        points = torch.rand(7, 2, dtype=torch.float64, device=DEVICE).requires_grad_()
        value = network(points)
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        (curve,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        return (slope[:, 1] - curve[:, 0]).square().mean() + (value - points[:, :1].sin()).square().mean()

    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    assert stats(trained_alike(network, numbers(7, 2).requires_grad_(), step)).hits == STEPS


class Weighted(nn.Module):
    """Its weights are arguments: a step of gradient descent on them is no change of the module."""

    def forward(self, x, first, second):
        return torch.tanh(x @ first) @ second


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = Weighted()
        self.first, self.second = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.randn(8, 1))


@pytest.mark.composes("`create_graph=True`: gradient penalties, PINNs, MAML, Hessian-vector products")
@pytest.mark.parametrize("functional", [False, True])
def test_an_inner_step_of_gradient_descent(functional):
    """MAML: the outer gradient goes through two inner ones. ``functional_call`` with their results runs eager."""

    def step(learner):
        amplitude = torch.rand((), dtype=torch.float64, device=DEVICE) + 0.5
        weights = [*learner.parameters()]
        for _ in range(3):
            x = numbers(5, 1)
            if functional:
                names = dict(zip([name for name, _ in learner.named_parameters()], weights, strict=True))
                loss = F.mse_loss(functional_call(learner, names, (x,)), amplitude * x.sin())
            else:
                loss = F.mse_loss(learner.network(x, *weights), amplitude * x.sin())
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            weights = [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
        return loss

    if functional:
        dispatched = trained_alike(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), numbers(5, 1), step)
        assert stats(dispatched).hits == STEPS and stats(dispatched).misses.total() == 2 * STEPS
        return
    learner = moved(Learner().double())
    dispatched = copy.deepcopy(learner)
    arguments = (numbers(5, 1), *(each.detach().requires_grad_() for each in learner.parameters()))
    add_tvm_dispatch(dispatched.network, arguments)
    close(trained(dispatched, step), trained(learner, step))
    assert stats(dispatched.network).hits == 3 * STEPS


@pytest.mark.composes("`create_graph=True`: gradient penalties, PINNs, MAML, Hessian-vector products")
def test_training_with_products_with_the_hessian():
    """Hutchinson's estimate of the trace of the Hessian by the parameters as a penalty."""

    def step(network):
        weights = [*network.parameters()]
        loss = network(numbers(7, 6)).sin().square().mean()
        slope = torch.autograd.grad(loss, weights, create_graph=True)
        signs = [torch.randn_like(weight).sign() for weight in weights]
        product = torch.autograd.grad(slope, weights, signs, create_graph=True)
        return loss + 0.1 * sum((sign * each).sum() for sign, each in zip(signs, product, strict=True))

    found = stats(trained_alike(MLP(dropout=0.2), numbers(7, 6), step))
    assert found.hits == STEPS and found.eager_backwards.total() == 2 * STEPS


@pytest.mark.composes("`create_graph=True`: gradient penalties, PINNs, MAML, Hessian-vector products")
def test_products_with_a_hessian_and_derivatives_of_any_order():
    dispatched, eager = pair(MLP(), rows())
    x, v = rows(), rows(5).detach()
    for function in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        close(*[function(lambda x, m=m: m(x).cos().sum(), x, v) for m in (dispatched, eager)])
    found = []
    for module in (dispatched, eager):
        value = module(x).sin().sum()
        for _ in range(4):
            value = sum(each.square().sum() for each in torch.autograd.grad(value, x, create_graph=True))
        found.append(torch.autograd.grad(value, [x, *module.parameters()], allow_unused=True))
    close(*found)


@pytest.mark.composes(
    "`is_grads_batched`, `jacobian(vectorize=True)`", "works, counted", section="Autograd, memory, threads"
)
def test_batched_gradients():
    dispatched, eager = pair(MLP(dropout=0.3), rows())
    x, batch = rows(), torch.randn(3, 7, 4, dtype=torch.float64)
    found = []
    for module in (dispatched, eager):
        torch.manual_seed(0)
        wanted = [x, *module.parameters()]
        found.append(torch.autograd.grad(module(x), wanted, batch, is_grads_batched=True, retain_graph=True))
        torch.manual_seed(1)
        first = torch.autograd.grad(module(x), wanted, batch, is_grads_batched=True, create_graph=True)
        found[-1] += torch.autograd.grad(sum(each.square().sum() for each in first), wanted, allow_unused=True)
    close(*found)
    counted = stats(dispatched).eager_backwards
    assert any("is_grads_batched=True" in reason for reason in counted)


@pytest.mark.composes("`is_grads_batched`, `jacobian(vectorize=True)`")
def test_a_jacobian_and_a_hessian_at_once():
    dispatched, eager = pair(MLP(), rows())
    x = rows().detach()
    whole = torch.autograd.functional
    close(*[whole.jacobian(m, x, vectorize=True) for m in (dispatched, eager)])
    close(*[whole.hessian(lambda x, m=m: m(x).sin().sum(), x, vectorize=True) for m in (dispatched, eager)])


def test_outputs_that_are_not_used_and_inputs_that_are_not_reached():
    dispatched, eager = pair(TwoOutputs(), rows())
    x, found = rows(), []
    for module in (dispatched, eager):
        left, right = module(x)
        wanted = [x, *module.parameters()]
        first = torch.autograd.grad(left.sin().sum(), wanted, create_graph=True, allow_unused=True)
        second = torch.autograd.grad(first[0].square().sum(), wanted, allow_unused=True, retain_graph=True)
        third = torch.autograd.grad(first[0].sum() * right.square().sum(), wanted, allow_unused=True)
        found.append([None if each is None else each.clone() for each in (*first, *second, *third)])
    close(*found)
    assert [each is None for each in found[0]].count(True) > 2


class Keeps(nn.Module):
    """The compiled backward saves the result and not the argument: it is held for a second derivative."""

    def forward(self, x):
        return torch.tanh(x)


def test_an_input_computed_by_another_call():
    """Only autograd refers to the tensors between two modules."""
    chain = [pair(Keeps(), rows()) for _ in range(3)]
    x, found = rows(), []
    for modules in zip(*chain, strict=True):
        value = x * 1
        for module in modules:
            value = module(value * 2)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), x))
    close(*found)


def test_of_two_inputs_one_is_computed_from_the_other():
    dispatched, eager = pair(Function(lambda a, b: a * b.sin()), (rows(), rows()))
    x, found = rows(), []
    for module in (dispatched, eager):
        (slope,) = torch.autograd.grad(module(x, x.exp()).sum(), x, create_graph=True)
        found.append([slope, *torch.autograd.grad(slope.square().sum(), x)])
    close(*found)


class OwnState(nn.Module):
    """A buffer that forward reads and then changes, computed draws, and a write into a view."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        y = x.sin() * self.scale.clone()
        self.scale.mul_(0.5)
        y[:, 1:3] = x[:, :2].cos() * torch.bernoulli(torch.sigmoid(x[:, 1:3]))
        return y.cumsum(1)


def test_buffers_draws_and_writes_are_those_of_the_call():
    dispatched, eager = pair(OwnState(), rows())
    x, found = rows(), []
    for module in (dispatched, eager):
        torch.manual_seed(0)
        first, second = module(x), module(x)
        state = torch.get_rng_state()
        slopes = [torch.autograd.grad(each.square().sum(), x, create_graph=True)[0] for each in (second, first)]
        found.append([*slopes, *torch.autograd.grad(sum(each.cos().sum() for each in slopes), x), module.scale])
        assert torch.equal(torch.get_rng_state(), state)
    close(*found)


def test_a_parameter_changed_in_place_is_an_error_of_such_a_backward_alone():
    dispatched, _ = pair(MLP(), rows())
    for create_graph in (False, True):
        x = rows()
        y = dispatched(x).sum()
        with torch.no_grad():
            dispatched.second.bias.add_(1)
        if create_graph:
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*shape \(4,\)"):
                torch.autograd.grad(y, x, create_graph=True)
        else:
            torch.autograd.grad(y, x)


def test_the_module_may_be_another_one_by_then():
    """As in eager, the backward belongs to the module as it was at the call."""
    dispatched, eager = pair(MLP(dropout=0.5), rows())
    found = []
    for module in (dispatched, eager):
        torch.manual_seed(0)
        x = rows()
        y = module(x)
        module.eval()
        module.second = nn.Linear(10, 4).double()
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.sin().sum(), [x, *module.first.parameters()]))
    close(*found)


def test_an_input_changed_in_place_afterwards_keeps_nothing_alive():
    """``x += f(x)`` makes the input a result of the call; a reference to it would be a hidden cycle."""
    dispatched, eager = pair(Keeps(), rows())
    found = []
    for module in (dispatched, eager):
        leaf = rows()
        x = leaf * 1
        x += module(x)
        (slope,) = torch.autograd.grad(x.sum(), leaf)
        found.append(slope)
        memory = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        assert memory() is None
    close(*found)


def test_what_is_held_is_released_by_the_backward():
    dispatched, _ = pair(Keeps(), rows())
    leaf = rows()
    x = leaf * 1
    memory = weakref.ref(x.untyped_storage())
    y = dispatched(x)
    del x
    assert memory() is not None
    y.sum().backward()
    assert memory() is None
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)


def test_under_a_checkpoint_and_hooks_on_saved_tensors():
    dispatched, eager = pair(nn.Sequential(Keeps(), nn.Linear(6, 6), Keeps()), rows())
    x, found = rows(), []
    for module in (dispatched, eager):
        y = checkpoint(module, x * 2, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            y = module(y)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, *module.parameters()], allow_unused=True))
    close(*found)


def test_sizes_that_vary():
    eager = MLP(dropout=0.2).double()
    dispatched = copy.deepcopy(eager)
    sample = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(dispatched, sample, dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    for rows_of in (3, 8):
        found, x = [], torch.randn(rows_of, 6, dtype=torch.float64, requires_grad=True)
        for module in (dispatched, eager):
            torch.manual_seed(0)
            (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), [x, *module.parameters()]))
        close(*found)
    assert stats(dispatched).hits == 2 and stats(dispatched).eager_backwards.total() == 2


class Cubed(torch.autograd.Function):
    """Its result has its argument's memory layout; traced, it is dense."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad_out):
        return 3 * grad_out * ctx.saved_tensors[0] ** 2


VIEWS = {
    "flatten": lambda x: x.flatten().sin(),
    "view_as_complex": lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()).abs().sin(),
    "unflatten": lambda x: x.reshape(2, -1, 3).cos(),
    "a product": lambda x: x.reshape(-1, 2) @ x.reshape(2, -1)[:, :3],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_behind_functions_of_the_users_own(view):
    module = Function(lambda x: VIEWS[view](Cubed.apply(x)))
    x, found = numbers(4, 6).t().requires_grad_(), []
    dispatched = add_tvm_dispatch(copy.deepcopy(module), x)
    for each in (dispatched, module):
        (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        found.append([slope, *torch.autograd.grad(slope.sin().sum(), x)])
    close(*found)
    assert stats(dispatched).hits == stats(dispatched).eager_backwards.total() == 1


def test_bags_of_computed_weights():
    """The graph has the form of the operator that has no gradient: tracing sees none at a computed tensor."""
    x, rows_of_bags = numbers(3, 4).requires_grad_(), torch.tensor([[0, 2], [1, 1]], device=DEVICE)
    bags = Function(lambda x, rows: F.embedding_bag(rows, x.exp(), mode="sum").sin())
    dispatched, found = add_tvm_dispatch(copy.deepcopy(bags), (x, rows_of_bags)), []
    for module in (dispatched, bags):
        found += torch.autograd.grad(module(x, rows_of_bags).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="_embedding_bag_backward"):
            found[-1].square().sum().backward()
    close(*found)
    assert stats(dispatched).hits == stats(dispatched).eager_backwards.total() == 1


def test_an_operator_without_a_second_derivative_is_eagers_error():
    log_probs = torch.randn(6, 2, 5, dtype=torch.float64).log_softmax(-1).requires_grad_()
    arguments = torch.tensor([[1, 2], [3, 1]]), torch.tensor([6, 5]), torch.tensor([2, 2])
    module = add_tvm_dispatch(nn.CTCLoss(), (log_probs, *arguments))
    (slope,) = torch.autograd.grad(module(log_probs, *arguments), log_probs, create_graph=True)
    with pytest.raises(RuntimeError, match="_ctc_loss_backward is not implemented"):
        slope.square().sum().backward()


def test_the_backend_of_torch_compile():
    dispatched = MLP().double()
    eager = copy.deepcopy(dispatched)
    compiled = torch.compile(dispatched, backend=tvm_dispatch)
    x, found = rows(), []
    for module in (compiled, eager):
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, *module.parameters()]))
    close(*found)
