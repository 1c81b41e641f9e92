"""A backward in several autograd nodes: the same gradients, each handed out when it is computed."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge import add_tvm_dispatch, explain, stats
from bridge.compile import Program
from bridge.compile.cpu.backend import CpuBackend
from bridge.dispatch import backward_nodes
from tests.bridge.compile.host_recorder import HostRecorder
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("lowered_once")

WIDTH, LAYERS = 16, 4


@pytest.fixture(autouse=True)
def small_modules_have_nodes(monkeypatch):
    monkeypatch.setattr(backward_nodes, "GRADIENTS_OF_NODE", 3)
    monkeypatch.setattr(backward_nodes, "LEAST_BYTES", 512)


@pytest.fixture(scope="module", autouse=True)
def held():
    """Modules that live to the end: the tests' modules are equal, and are lowered and compiled once."""
    torch.manual_seed(0)
    towers = [Tower(tied).double().to(DEVICE) for tied in (False, True)]
    for tower in towers:
        add_tvm_dispatch(tower, torch.randn(3, 5, WIDTH, dtype=torch.float64, device=DEVICE))
    return towers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Tower(nn.Module):
    """Layers one after another; two results."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = nn.Parameter(self.head.weight.detach())
            self.layers[-1].up.weight = self.layers[0].up.weight

    def forward(self, x):
        if x.requires_grad:
            x = x + 0
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean(-1), x


def pair(tied: bool = False, x: torch.Tensor | None = None, **options):
    """An eager module, an equal one that is dispatched in several nodes, and their input."""
    torch.manual_seed(0)
    eager = Tower(tied).double().to(DEVICE)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, device=DEVICE) if x is None else x
    module = add_tvm_dispatch(copy.deepcopy(eager), x, **options)
    assert len(stats(module).entries[0].programs.nodes) >= 3
    return eager, module, x


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def gradients(module, x, places=(0, 1), backward=lambda loss: loss.backward()):
    module.zero_grad()
    torch.manual_seed(5)
    results = module(x)
    backward(sum(results[place].square().sum() for place in places))
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


@pytest.fixture
def ran(monkeypatch):
    """The events of a backward, in order: programs that run, and notes of the tests."""
    seen, call = [], Program.executor.func

    def executor(self):
        execute = call(self)

        def noted(inputs, **options):
            seen.append(self.name)
            return execute(inputs, **options)

        return noted

    monkeypatch.setattr(Program.executor, "func", executor)
    return seen


@pytest.mark.parametrize("places", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_eagers_and_bits_those_of_one_node(tied, places, monkeypatch):
    eager, module, x = pair(tied)
    ours = gradients(module, x, places)
    close(ours, gradients(eager, x, places))
    monkeypatch.setattr(backward_nodes, "MOST_NODES", 1)
    whole = add_tvm_dispatch(copy.deepcopy(eager), x)
    assert len(stats(whole).entries[0].programs.nodes) == 1
    for mine, other in zip(ours, gradients(whole, x, places), strict=True):
        assert mine is other is None or torch.equal(mine, other)
    assert stats(module).hits == 1 and not stats(module).misses


def test_gradients_are_handed_out_as_they_are_computed(ran):
    _, module, x = pair()
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    gradients(module, x)
    nodes = stats(module).entries[0].programs.backward.step.nodes
    backwards = [place for place, each in enumerate(ran) if each == "Tower_backward"]
    assert len(backwards) == len(nodes)
    for node, begin, end in zip(nodes, backwards, [*backwards[1:], len(ran)], strict=True):
        assert sorted(ran[begin + 1 : end]) == sorted(node)
    assert "head.weight" in nodes[0] and "layers.0.norm.weight" in nodes[-1]
    told = str(explain(module).full)
    assert f"gradients by {len(nodes)} autograd nodes" in told and "head.weight" in told


def test_autograd_runs_no_more_nodes_than_are_asked_for(ran):
    eager, module, x = pair()
    nodes = stats(module).entries[0].programs.nodes
    for chosen, number in (("head.bias", 1), ("layers.0.norm.weight", len(nodes))):
        found = []
        for each in (eager, module):
            torch.manual_seed(5)
            ran.clear()
            loss = each(x)[0].sum()
            found.append(torch.autograd.grad(loss, dict(each.named_parameters())[chosen]))
        close(*found)
        assert ran.count("Tower_backward") == number


def test_a_backward_that_ends_early_lets_go_of_its_tensors():
    _, module, x = pair()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(weakref.ref(each)) or each, lambda it: it):
        loss = module(x)[0].sum()
    torch.autograd.grad(loss, [module.head.bias])
    del loss
    owned = {id(each) for each in [*module.parameters(), *module.buffers(), x]}
    assert len(saved) > LAYERS and not [each for each in saved if each() is not None and id(each()) not in owned]


def test_a_retained_graph_runs_again_and_a_freed_one_does_not():
    eager, module, x = pair()
    twice = []
    for each in (eager, module):
        torch.manual_seed(5)
        each.zero_grad()
        loss = each(x)[0].sum()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, [each.head.bias], retain_graph=True)
        loss.backward()
        twice.append([parameter.grad for parameter in each.parameters()])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    close(*twice)


@pytest.mark.parametrize("tied", [False, True])
def test_derivatives_of_the_gradients_and_batches_of_them(tied):
    """All nodes hand out gradients that eager's operators have computed at the first."""
    eager, module, _ = pair(tied)
    found = []
    for each in (eager, module):
        torch.manual_seed(0)
        x = torch.randn(3, 5, WIDTH, dtype=torch.float64, device=DEVICE)
        wanted = [*each.parameters()]
        loss = each(x)[0]
        slopes = torch.autograd.grad(loss.sum(), wanted, create_graph=True)
        curved = torch.autograd.grad(sum(slope.square().sum() for slope in slopes), wanted, retain_graph=True)
        batch = torch.stack([torch.ones_like(loss), loss.detach()])
        batched = torch.autograd.grad(loss, wanted[-1:] + wanted[:1], batch, is_grads_batched=True)
        found.append([*slopes, *curved, *batched])
    close(*found)
    assert stats(module).eager_backwards.total() >= 2


def test_an_optimizer_in_the_backward_changes_what_is_read_no_more():
    """It steps as soon as a parameter has its gradient, while other gradients are still to be computed."""
    modules = []
    for dispatched in (False, True):
        eager, module, x = pair(tied=True)
        each = module if dispatched else eager
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in each.parameters()}

        def step(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        for seed in range(4):
            torch.manual_seed(seed)
            each(x)[0].square().mean().backward()
        modules.append(list(each.parameters()))
    close(*modules)


def test_a_change_in_place_between_the_nodes_is_noticed():
    _, module, x = pair()

    def change(_):
        with torch.no_grad():
            module.layers[0].down.weight.mul_(2)

    module.head.weight.register_post_accumulate_grad_hook(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(x)[0].sum().backward()


def test_a_gradient_between_the_nodes_that_was_replaced_is_noticed():
    _, module, x = pair()
    loss = module(x)[1].sum()
    first = loss.grad_fn.next_functions[0][0]
    between = [node for node, _ in first.next_functions if "Accumulate" not in node.name()]
    for node in between:
        node.register_prehook(lambda gradients: tuple(each.clone() for each in gradients))
    with pytest.raises(RuntimeError, match="between two autograd nodes of a module dispatched to TVM was replaced"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_accumulation_and_anomaly_mode(reentrant):
    eager, module, x = pair(x=torch.randn(3, 5, WIDTH, dtype=torch.float64, device=DEVICE, requires_grad=True))
    found = []
    for each in (eager, module):
        each.zero_grad()
        x.grad = None
        torch.manual_seed(5)
        with torch.autograd.detect_anomaly(check_nan=True):
            for _ in range(2):
                checkpoint(each, x, use_reentrant=reentrant)[0].sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in each.parameters())])
    close(*found)
    assert stats(module).hits == (2 if reentrant else 4)


def test_each_tensor_is_saved_once():
    """By one node only: as often as for a module with one backward node."""
    _, module, x = pair()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each):
        loss = module(x)[0].sum()
    entry = stats(module).entries[0]
    assert len(packed) == len(entry.programs.backward.program.layout.params) - 2
    loss.backward()


@pytest.mark.parametrize("places", [(0, 1), (1,)])
def test_sizes_that_vary(places):
    batch = torch.export.Dim("batch", min=2, max=64)
    eager, module, _ = pair(dynamic_shapes=({0: batch},))
    for rows in (3, 7):
        x = torch.randn(rows, 5, WIDTH, dtype=torch.float64, device=DEVICE)
        close(gradients(module, x, places), gradients(eager, x, places))
    assert stats(module).hits == 2 and len(stats(module).entries) == 1


def test_autocast_around_the_backward():
    _, module, x = pair()
    wanted = gradients(module, x)

    def under_autocast(loss):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss.backward()

    assert all(map(torch.equal, gradients(module, x, backward=under_autocast), wanted))


def test_another_default_type_around_the_backward():
    _, module, x = pair()
    wanted = gradients(module, x)

    def in_double(loss):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(before)

    assert all(map(torch.equal, gradients(module, x, backward=in_double), wanted))


def test_a_gradient_that_is_a_grad_out():
    """The gradient is handed out after its last reader, as are copies of it."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.first, self.last = Tower(), *(nn.Parameter(torch.randn(15, WIDTH)) for _ in range(2))

        def forward(self, x):
            return self.tower(x)[1].reshape(15, WIDTH) + self.first + self.last

    def double(parameter):  # a hook may write into its gradient
        parameter.grad.mul_(2)

    torch.manual_seed(0)
    eager = Sums().double().to(DEVICE)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, device=DEVICE)
    module = add_tvm_dispatch(copy.deepcopy(eager), x)
    assert len(stats(module).entries[0].programs.nodes) > 2
    for each in (eager, module):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(double)
        torch.manual_seed(5)
        for _ in range(2):
            each(x).square().sum().backward()
    close(*[[parameter.grad for parameter in each.parameters()] for each in (module, eager)])


def test_small_modules_have_one_node(monkeypatch):
    monkeypatch.undo()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, device=DEVICE)
    module = add_tvm_dispatch(Tower().double().to(DEVICE), x)
    entry = stats(module).entries[0]
    assert len(entry.programs.nodes) == 1 and not entry.programs.backward.step.nodes
    assert module(x)[1].grad_fn.name() == "_DispatchedBackward"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="with a recorder on the host")
def test_segments_are_recorded_each_by_itself(monkeypatch):
    """Gradients that are kept, two passes at once, passes that end early."""
    monkeypatch.setattr(CpuBackend, "recorder", lambda self, program: HostRecorder(program), raising=False)
    eager, module, x = pair(cuda_graphs=True)
    kept = []
    for step in range(24):
        made = []
        for each in (module, eager):
            torch.manual_seed(step)
            each.zero_grad(set_to_none=step % 3 == 0)
            first, second = each(x), each(x * 0.5)
            early = torch.autograd.grad(first[0].sum(), [each.head.bias], retain_graph=True)
            (first[0].sum() + second[0].square().sum()).backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.01 * parameter.grad
            made.append([*early, *(parameter.grad for parameter in each.parameters()), *each.parameters()])
        close(*made)
        kept += [(each, each.detach().clone()) for each in made[0][:1]]
    assert all(torch.equal(now, then) for now, then in kept)
    found = stats(module).graphs
    assert found.replays > 24 * len(stats(module).entries[0].programs.nodes) and not found.refused, found
