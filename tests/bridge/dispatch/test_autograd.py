"""Dispatched calls inside autograd: several forwards, several backwards, accumulation, and errors."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.models import MLP, TwoOutputs, bert_layer

pytestmark = pytest.mark.usefixtures("lowered_once")

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def rows(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, 6, generator=generator, dtype=torch.float64).requires_grad_()


def pair(module: nn.Module, sample=None) -> tuple[nn.Module, nn.Module]:
    """A dispatched float64 copy of a module, and the module itself for eager."""
    module = module.double()
    dispatched = copy.deepcopy(module)
    add_tvm_dispatch(dispatched, rows() if sample is None else sample)
    return dispatched, module


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_gradients(dispatched: nn.Module, eager: nn.Module) -> None:
    actual, expected = gradients(dispatched), gradients(eager)
    assert {n for n, g in actual.items() if g is None} == {n for n, g in expected.items() if g is None}
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(actual[name], gradient, **TOLERANCE)


def test_two_forwards_before_the_two_backwards():
    """Two calls in flight with masks of their own: neither may overwrite the other's saved tensors."""

    def steps(module):
        torch.manual_seed(0)
        a, b = rows(1), rows(2)
        first = module(a)
        second = module(b)
        kept = first.detach().clone()
        second.square().sum().backward()
        first.cos().sum().backward()
        assert torch.equal(first.detach(), kept), "a later call changed an earlier result"
        return a.grad, b.grad, first.detach(), second.detach()

    dispatched, eager = pair(MLP(dropout=0.5))
    torch.testing.assert_close(steps(dispatched), steps(eager), **TOLERANCE)
    assert_same_gradients(dispatched, eager)
    assert stats(dispatched).hits == 2


def test_two_layers_that_share_one_compilation_in_one_graph():
    """Equal layers compile once and run inside one graph: the first layer's saved tensors outlive the second's call."""
    layers = nn.Sequential(*(bert_layer() for _ in range(2))).double()
    dispatched = copy.deepcopy(layers)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    for layer in dispatched:
        add_tvm_dispatch(layer, x)

    def step(module):
        torch.manual_seed(0)
        return torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])

    torch.testing.assert_close(step(dispatched), step(layers), rtol=1e-10, atol=1e-10)
    assert [stats(layer).hits for layer in dispatched] == [1, 1]


@pytest.mark.composes(
    "retained graphs, partial backwards, backward on another thread",
    "works",
    section="Autograd, memory, threads",
)
def test_retain_graph_and_two_backwards():
    def steps(module):
        torch.manual_seed(0)
        x = rows()
        y = module(x)
        y.square().sum().backward(retain_graph=True)
        y.sum().backward()
        return x.grad

    dispatched, eager = pair(MLP(dropout=0.5))
    torch.testing.assert_close(steps(dispatched), steps(eager), **TOLERANCE)
    assert_same_gradients(dispatched, eager)
    assert stats(dispatched).hits == 1


def test_second_backward_without_retain_graph_fails_as_in_eager():
    for module in pair(MLP()):
        loss = module(rows()).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_results_that_share_nothing_are_of_one_graph():
    """A call is one graph: eager frees each result's own."""

    def steps(towers, **retained):
        a, b = towers(torch.ones(2, 3))
        a.sum().backward(**retained)
        b.sum().backward()
        return [each.grad for each in towers.parameters()]

    def forward(module, x):
        return module.a(x).tanh(), module.b(x).tanh()

    eager = type("Towers", (nn.Module,), {"forward": forward})()
    eager.a, eager.b = nn.Linear(3, 3), nn.Linear(3, 3)
    dispatched, wanted = copy.deepcopy(eager), steps(eager)
    add_tvm_dispatch(dispatched, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        steps(dispatched)
    dispatched.zero_grad()
    torch.testing.assert_close(steps(dispatched, retain_graph=True), wanted)


def test_accumulation_over_three_steps():
    def steps(module):
        torch.manual_seed(0)
        for seed in range(3):
            (module(rows(seed)).square().mean() / 3).backward()

    dispatched, eager = pair(MLP(dropout=0.5))
    steps(dispatched), steps(eager)
    assert_same_gradients(dispatched, eager)
    assert stats(dispatched).hits == 3


def test_gradients_do_not_alias():
    """A gradient that autograd stole from the backward must not be reused by the next one."""
    dispatched, eager = pair(MLP())
    held = {}
    for module in (dispatched, eager):
        module(rows(1)).sum().backward()
        held[module] = {name: gradient.clone() for name, gradient in gradients(module).items()}
        stolen = gradients(module)
        module.zero_grad(set_to_none=True)
        module(rows(2)).square().sum().backward()
        for name, gradient in stolen.items():
            torch.testing.assert_close(gradient, held[module][name], rtol=0, atol=0)
    assert_same_gradients(dispatched, eager)


@pytest.mark.parametrize("loss", ["both", "left", "right"])
def test_output_that_the_loss_does_not_use(loss):
    def step(module):
        x = rows()
        left, right = module(x)
        terms = {"both": left.sum() + right.square().sum(), "left": left.square().sum(), "right": right.sum()}
        terms[loss].backward()
        return x.grad

    dispatched, eager = pair(TwoOutputs())
    torch.testing.assert_close(step(dispatched), step(eager), **TOLERANCE)
    # Also which are None: an optimizer with weight decay changes a parameter of zero gradient, not one of none.
    assert_same_gradients(dispatched, eager)
    assert stats(dispatched).hits == 1


def test_no_output_is_used():
    dispatched, eager = pair(TwoOutputs())
    for module in (dispatched, eager):
        module(rows())
    assert all(gradient is None for gradient in gradients(dispatched).values())


def test_expanded_grad_out():
    """``sum().backward()`` sends a gradient of stride zero."""

    def step(module):
        x = rows()
        module(x).sum().backward()
        return x.grad

    dispatched, eager = pair(MLP())
    torch.testing.assert_close(step(dispatched), step(eager), **TOLERANCE)
    assert_same_gradients(dispatched, eager)


def test_transposed_grad_out():
    def step(module):
        x = rows()
        weight = torch.arange(28, dtype=torch.float64).reshape(4, 7)
        (module(x).t() * weight).sum().backward()
        return x.grad

    dispatched, eager = pair(MLP())
    torch.testing.assert_close(step(dispatched), step(eager), **TOLERANCE)


@pytest.mark.composes("retained graphs, partial backwards, backward on another thread")
def test_gradients_of_some_inputs_only():
    dispatched, eager = pair(MLP())
    x = rows()
    for select in (lambda m: [x], lambda m: [m.second.weight], lambda m: [m.first.bias, x]):
        actual = torch.autograd.grad(dispatched(x).square().sum(), select(dispatched))
        expected = torch.autograd.grad(eager(x).square().sum(), select(eager))
        torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert all(gradient is None for gradient in gradients(dispatched).values())


def test_calls_that_feed_each_other():
    """A dispatched module applied to its own output, as in a recurrent loop: parameters' gradients add up."""

    def step(module):
        torch.manual_seed(0)
        x = rows()
        y = x
        for _ in range(4):
            y = module(y)
        y.square().sum().backward()
        return x.grad

    dispatched, eager = pair(MLP(6, 10, 6, dropout=0.2))
    torch.testing.assert_close(step(dispatched), step(eager), **TOLERANCE)
    assert_same_gradients(dispatched, eager)
    assert stats(dispatched).hits == 4


def test_result_changed_in_place():
    """Eager allows it where the result is not needed for backward; dispatch does, or fails like autograd does."""
    dispatched, eager = pair(MLP())
    x = rows()
    expected = torch.autograd.grad(eager(x).mul_(2).square().sum(), x)
    actual = torch.autograd.grad(dispatched(x).mul_(2).square().sum(), x)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


class Sigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return torch.sigmoid(self.linear(x))


def test_result_that_backward_needs_changed_in_place():
    """Eager saved the result and refuses; dispatch refuses or has saved something else: never a wrong gradient."""
    dispatched, eager = pair(Sigmoid())
    x = rows()
    expected = torch.autograd.grad(eager(x).mul(2).sum(), x)
    try:
        actual = torch.autograd.grad(dispatched(x).mul_(2).sum(), x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("which", ["parameter", "input"])
def test_operand_changed_between_forward_and_backward(which):
    """Eager notices that a saved operand was modified; dispatch must notice as well, or not depend on it."""
    dispatched, eager = pair(MLP())
    x = rows()
    expected = torch.autograd.grad(eager(x).sum(), [x, eager.first.weight])
    y = dispatched(x)
    with torch.no_grad():
        (dispatched.second.weight if which == "parameter" else x).mul_(3)
    try:
        actual = torch.autograd.grad(y.sum(), [x, dispatched.first.weight])
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_saved_tensors_go_through_autograd():
    """Hooks on saved tensors (offloading, activation statistics) see every captured tensor and may replace it."""
    dispatched, eager = pair(MLP(dropout=0.5))
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def step(module):
        torch.manual_seed(0)
        x = rows()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = module(x)
        return torch.autograd.grad(y.square().sum(), [x, *module.parameters()])

    actual = step(dispatched)
    assert packed, "nothing was saved through autograd"
    torch.testing.assert_close(actual, step(eager), **TOLERANCE)


def test_saved_tensors_are_released():
    """After the backward, and after a result is dropped without one, no captured tensor stays alive."""
    dispatched, _ = pair(MLP(dropout=0.5))
    alive = []

    def pack(tensor):
        # Parameters and arguments are alive anyway; the test is about tensors that the call made.
        if tensor.grad_fn is None and not tensor.requires_grad:
            alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    for consume in (lambda y: y.sum().backward(), lambda y: None):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = dispatched(rows())
        consume(y)
        del y
    dispatched.zero_grad(set_to_none=True)
    gc.collect()
    x = rows()
    own = {p.untyped_storage().data_ptr() for p in (*dispatched.parameters(), x)}
    assert not [r for r in alive if r() is not None and r().data_ptr() not in own]


def test_hook_on_the_result():
    dispatched, eager = pair(MLP())

    def step(module):
        x = rows()
        y = module(x)
        y.register_hook(lambda gradient: gradient * 3)
        return torch.autograd.grad(y.square().sum(), x)

    torch.testing.assert_close(step(dispatched), step(eager), **TOLERANCE)


@pytest.mark.composes("retained graphs, partial backwards, backward on another thread")
def test_backward_on_another_thread():
    """Autograd may run the backward elsewhere; nothing may depend on the thread of the forward."""
    dispatched, eager = pair(MLP(dropout=0.5))
    results = {}
    for module in (dispatched, eager):
        torch.manual_seed(0)
        x = rows()
        loss = module(x).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        results[module] = x.grad
    torch.testing.assert_close(results[dispatched], results[eager], **TOLERANCE)
    assert_same_gradients(dispatched, eager)
