"""A custom ``autograd.Function`` that cannot be traced runs as it is, in two library calls of the program."""

from __future__ import annotations

import copy
import ctypes
import gc

import numpy as np
import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, save_compiled, stats
from bridge.capture.applications import _GRAPHS

pytestmark = pytest.mark.cpu("the Functions compute with NumPy")


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return torch.from_numpy(np.sin(x.detach().numpy() * factor))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(grad.numpy() * np.cos(x.detach().numpy() * ctx.factor) * ctx.factor), None


class RawCopy(torch.autograd.Function):
    """A kernel that torch does not know of."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class Scaled(torch.autograd.Function):
    """Forward reads a number; backward decides by the gradient's numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = 1 + float(x.abs().max())
        return x / ctx.scale

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.scale if torch.equal(grad, torch.ones_like(grad)) else grad * (1 / ctx.scale)


class Loss(torch.autograd.Function):
    """Cross entropy that writes its gradient into its argument, unseen by torch."""

    @staticmethod
    def forward(ctx, scores, labels):
        x, rows = scores.detach().numpy(), np.arange(len(scores))
        e = np.exp(x - x.max(-1, keepdims=True))
        e /= e.sum(-1, keepdims=True)
        loss = -np.log(e[rows, labels.numpy()]).mean()
        e[rows, labels.numpy()] -= 1
        x[...] = e / len(x)
        ctx.save_for_backward(scores.detach())
        return torch.tensor(loss)

    @staticmethod
    def backward(ctx, grad):
        (scores,) = ctx.saved_tensors
        return scores * grad, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        y = torch.from_numpy(a.detach().numpy() @ w.detach().numpy())
        best = torch.from_numpy(y.numpy().argmax(-1))
        ctx.mark_non_differentiable(best)
        return y, best

    @staticmethod
    def backward(ctx, grad, _):
        a, w = (each.detach().numpy() for each in ctx.saved_tensors)
        return torch.from_numpy(grad.numpy() @ w.T), torch.from_numpy(a.T @ grad.numpy())


class Model(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4).double(), nn.Parameter(torch.randn(4, 5).double())
        self.then = then

    def forward(self, x):
        return self.then(self, self.layer(x))


LABELS = torch.tensor([0, 1, 2])


def thrice(m, h):
    for _ in range(3):
        h = h + Sine.apply(h.relu() * 2, 0.5)
    return h


def read_later(m, h):
    scores = h * 2
    return Loss.apply(scores, LABELS) + scores.detach().sum() * h.mean()


def selected(m, h):
    y, best = Product.apply(h.cos(), m.weight)
    return y.sin() * best.unsqueeze(-1)


USES = {
    "NumPy": lambda m, h: Sine.apply(h, 2.0).tanh(),
    "a parameter": lambda m, h: Sine.apply(m.weight, 2.0).sum() + h,
    "a kernel by addresses": lambda m, h: RawCopy.apply(h.exp()).tanh(),
    "an argument with other strides": lambda m, h: RawCopy.apply(h.exp().t()).tanh(),
    "numbers decide": lambda m, h: Scaled.apply(h.exp()).sum(),
    "writes its argument": lambda m, h: Loss.apply(h * 2, LABELS) * 3 + h.mean(),
    "writes its argument, read later": lambda m, h: (lambda s: Loss.apply(s, LABELS) + s.detach().sum() * h.mean())(
        h * 2
    ),
    "two results": selected,
    "three applications": thrice,
}


def steps(module, count=4):
    found, optimizer = [], torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    for step in range(count):
        y = module(torch.randn(3, 4, dtype=torch.float64))
        (y.sum() if step % 2 else y.square().sum()).backward()
        found += [y.detach().clone(), *(each.grad.clone() for each in module.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    first, second = (module(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2))
    second.square().sum().backward()
    first.sum().backward()
    found += [each.grad.clone() for each in module.parameters() if each.grad is not None]
    with torch.no_grad():
        found.append(module(torch.randn(3, 4, dtype=torch.float64)))
    return found


@pytest.mark.parametrize("use", USES)
def test_training_is_eagers(use):
    torch.manual_seed(0)
    module = Model(USES[use])
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x := torch.randn(3, 4, dtype=torch.float64))
    with torch.no_grad():
        add_tvm_dispatch(module, x)
    before = [each.detach().clone() for each in module.parameters()]
    assert all(map(torch.equal, before, eager.parameters()))
    for ours, theirs in zip(steps(module), steps(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 7 and not stats(module).misses


class Cast(torch.autograd.Function):
    """Its result's type is its argument's, which autocast decides."""

    @staticmethod
    def forward(ctx, x, w):
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        ctx.save_for_backward(y, w)
        return torch.mm(y, w)

    @staticmethod
    def backward(ctx, grad):
        y, w = ctx.saved_tensors
        return torch.mm(grad.to(w.dtype), w.t()) * float(y.numel()), None


def test_autocast_is_as_around_the_call():
    module = Model(lambda m, h: Cast.apply(h, m.weight.detach())).float()
    eager, x = copy.deepcopy(module), torch.randn(3, 4)
    found = []
    for each in (module, eager):
        with torch.autocast("cpu", torch.bfloat16):
            if each is module:
                add_tvm_dispatch(module, x)
            y = each(x)
        y.float().sum().backward()
        found.append((y, each.layer.weight.grad))
    assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16 and stats(module).hits == 1
    for ours, theirs in zip(*found, strict=True):  # sums of bfloat16 that nearly cancel: off by terms' rounding
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_saved_state_lives_as_long_as_the_graph():
    module = Model(USES["NumPy"])
    add_tvm_dispatch(module, x := torch.randn(3, 4, dtype=torch.float64))
    gc.collect()
    before = len(_GRAPHS)
    outputs = [module(x) for _ in range(3)]
    assert len(_GRAPHS) == before + 3
    outputs[0].sum().backward(retain_graph=True)
    outputs[0].sum().backward()
    del outputs
    gc.collect()
    assert len(_GRAPHS) == before


def test_equal_layers_share_one_program():
    module = nn.Sequential(*(Model(USES["NumPy"]) for _ in range(3)))
    add_tvm_dispatch(module, torch.randn(3, 4, dtype=torch.float64))
    keys = {
        node.args[0] for node in stats(module).entries[0].lowered.captured.graph.nodes if "apply_opaque" in node.name
    }
    assert len(keys) == 1


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() + torch.rand(x.shape, dtype=x.dtype).numpy())

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy().copy())


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        module.calls += 1
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


left = []


class Leaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        left.append(x.detach() * 2)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy().copy())


def leaked(m, h):
    y = Leaks.apply(h)
    return y * left.pop()


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * float(x.sum())

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(float(grad.sum()))


class Dirties(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(1.5)

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.sum())


def dirtied(m, h):
    y = h * 2
    Dirties.apply(y)
    return y.sum()


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1) if float(x.sum()) else x

    @staticmethod
    def backward(ctx, grad):
        return grad.view(3, 4) * float(grad.sum())


def written_later(m, h):
    kept = h.exp()
    y = Sine.apply(kept, 2.0)
    kept.add_(1)
    return y.sum() + kept.sum()


REFUSED = {
    "what it keeps is written later": (written_later, "Sine"),
    "draws": (lambda m, h: Noise.apply(h), "Noise"),
    "an object": (lambda m, h: Counts.apply(h, m), "calls|Counts"),
    "made inside, used outside": (leaked, "Leaks"),
    "writes the gradient": (lambda m, h: Writes.apply(h), "Writes: its backward"),
    "a view": (lambda m, h: View.apply(h), "View"),
    "writes its argument": (dirtied, "Dirties"),
}


@pytest.mark.parametrize("use", REFUSED)
def test_refused_by_name(use):
    then, words = REFUSED[use]
    module = Model(then)
    module.calls = 0
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(module, torch.randn(3, 4, dtype=torch.float64), whole=True)
    assert module.calls == 0


def test_a_saved_call_has_no_python_code(tmp_path):
    module = Model(USES["NumPy"])
    add_tvm_dispatch(module, torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(UnsupportedModule, match="Python code"):
        save_compiled(module, tmp_path / "saved")


class Changing(torch.autograd.Function):
    """Returns another form than in its first call, where its argument is large."""

    @staticmethod
    def forward(ctx, x):
        y = np.sin(x.detach().numpy())
        return torch.from_numpy(y.astype(np.float32) if y.size and abs(x.detach().numpy()).max() > 100 else y)

    @staticmethod
    def backward(ctx, grad):
        return grad.double() * float(grad.sum())


def test_another_form_is_an_error():
    module = Model(lambda m, h: Changing.apply(h * 1.0))
    add_tvm_dispatch(module, x := torch.randn(3, 4, dtype=torch.float64))
    module(x)
    with pytest.raises(RuntimeError, match="Changing returns"):
        module(x * 1e6)


@torch.library.custom_op("tvm_dispatch_tests::doubled", mutates_args={})
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    made = torch.empty_like(x)
    return torch.ops.higher_order.cond(torch.ones((), dtype=torch.bool), torch.clone, torch.clone, (made,))


doubled.register_autograd(lambda ctx, grad: doubled(grad))


def test_an_operator_whose_fake_form_calls_a_higher_order_operator():
    """As an operator of ``triton_op`` does, whose fake form launches the kernel by a higher-order operator."""
    module = Model(lambda m, h: torch.ops.tvm_dispatch_tests.doubled(h).tanh())
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, torch.randn(3, 4, dtype=torch.float64))
    for ours, theirs in zip(steps(module), steps(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 6


WEIGHT = nn.Parameter(torch.ones(4, dtype=torch.float64))


class Reversible(torch.autograd.Function):
    """Its backward runs forward again, and adds to a parameter's gradient itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * WEIGHT.detach() * float(x.abs().max() > 0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (x * WEIGHT).backward(grad)
        return x.grad


def test_a_backward_that_adds_to_gradients_is_refused_and_adds_none():
    module = Model(lambda m, h: Reversible.apply(h).tanh())
    WEIGHT.grad = torch.full((4,), 2.0, dtype=torch.float64)
    with pytest.raises(UnsupportedModule, match="runs a backward inside"):
        add_tvm_dispatch(module, torch.randn(3, 4, dtype=torch.float64), whole=True)
    assert torch.equal(WEIGHT.grad, torch.full((4,), 2.0, dtype=torch.float64))
    assert all(each.grad is None for each in module.parameters())


def test_a_function_that_closes_over_a_tensor_is_refused():
    """Each call makes another class; the program would keep the first one's tensor."""

    def then(m, h):
        scale = m.weight.detach()[:, 0].exp()

        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return torch.from_numpy(x.detach().numpy() * scale.numpy())

            @staticmethod
            def backward(ctx, grad):
                return grad * scale * float(grad.sum() != 0)

        return Local.apply(h)

    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(Model(then), torch.randn(3, 4, dtype=torch.float64), whole=True)


def test_a_function_that_each_call_makes_anew_and_that_writes_ends():
    """Capture tries again with other assumptions about a Function, which it knows by its name."""

    def then(m, h):
        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x.mul_(2)
                return x * 3

            @staticmethod
            def backward(ctx, grad):
                return grad * 6

        return Local.apply(h * 1).tanh()

    module = Model(then)
    eager, x = copy.deepcopy(module), torch.randn(3, 4, dtype=torch.float64)
    try:
        add_tvm_dispatch(module, x, whole=True)
    except UnsupportedModule:
        return
    torch.testing.assert_close(module(x), eager(x))
