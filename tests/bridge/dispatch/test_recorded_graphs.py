"""Training loops of a module whose programs are recorded, with a recorder on the host: all give eager's numbers."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge import add_tvm_dispatch, explain, remove_tvm_dispatch, stats
from bridge.compile.cpu.backend import CpuBackend
from tests.bridge.compile.host_recorder import HostRecorder


class Layer(nn.Module):
    """Products, a norm, two dropouts, a buffer that is written."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        h = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + F.dropout(self.down(h), 0.1, self.training)


@pytest.fixture(scope="module", autouse=True)
def _recorder_on_the_host():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "recorder", lambda self, program: HostRecorder(program), raising=False)
        yield


@pytest.fixture(scope="module")
def pair():
    return Pair()


class Pair:
    """A dispatched module and eager's, fed alike; numbers, gradients and the generator are compared after each step."""

    def __init__(self, dynamic=False, **given):
        torch.manual_seed(0)
        self.ours = Layer().double()
        self.eager = copy.deepcopy(self.ours)
        given = {"cuda_graphs": True, "on_miss": "error", **given}
        if dynamic:
            given["dynamic_shapes"] = ({0: torch.export.Dim("rows", min=2)},)
        add_tvm_dispatch(self.ours, self.batch(0), **given)
        if not dynamic:
            self.ours.eval()
            with torch.no_grad():
                add_tvm_dispatch(self.ours, self.batch(0), **given)
            self.ours.train()
        self.optimizers = [torch.optim.SGD(each.parameters(), 1e-4, momentum=0.9) for each in (self.ours, self.eager)]

    @staticmethod
    def batch(seed, rows=7):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 24, generator=generator, dtype=torch.float64).requires_grad_()

    def step(self, seed, work):
        """``work(module, optimizer)`` for both, from one state of the generator."""
        made, states = [], []
        for module, optimizer in zip((self.ours, self.eager), self.optimizers, strict=True):
            torch.manual_seed(seed)
            made.append(work(module, optimizer))
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        made[0] += [*self.ours.state_dict().values(), *(each.grad for each in self.ours.parameters())]
        made[1] += [*self.eager.state_dict().values(), *(each.grad for each in self.eager.parameters())]
        for ours, theirs in zip(*made, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    @property
    def graphs(self):
        return stats(self.ours).graphs


def plain(module, optimizer, rows=7):
    optimizer.zero_grad()
    x = Pair.batch(0, rows)
    y = module(x)
    y.square().sum().backward()
    optimizer.step()
    return [y.detach(), x.grad]


def gradients_set_to_zero(module, optimizer):
    optimizer.zero_grad(set_to_none=False)
    return plain(module, optimizer)


def two_forwards_before_a_backward(module, optimizer):
    optimizer.zero_grad()
    a, b = Pair.batch(1), Pair.batch(2)
    one, other = module(a), module(b)
    (one.square().sum() + other.sum()).backward()
    optimizer.step()
    return [one.detach(), other.detach(), a.grad, b.grad]


def backwards_in_the_order_of_forwards(module, optimizer):
    a, b = Pair.batch(3), Pair.batch(4)
    one, other = module(a), module(b)
    one.square().sum().backward()
    other.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [a.grad, b.grad]


def accumulation(module, optimizer):
    optimizer.zero_grad()
    for part in range(3):
        module(Pair.batch(part)).square().sum().backward()
    optimizer.step()
    return []


def evaluation(module, optimizer):
    module.eval()
    with torch.no_grad():
        y = module(Pair.batch(5))
    module.train()
    return [y]


def checkpointing(module, optimizer):
    optimizer.zero_grad()
    x = Pair.batch(6)
    y = checkpoint(module, x, use_reentrant=False)
    y.square().sum().backward()
    optimizer.step()
    return [y.detach(), x.grad]


def backward_twice(module, optimizer):
    optimizer.zero_grad()
    loss = module(Pair.batch(7)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return []


LOOPS = [
    *(plain, gradients_set_to_zero, two_forwards_before_a_backward, backwards_in_the_order_of_forwards),
    *(accumulation, evaluation, checkpointing, backward_twice),
]


@pytest.mark.parametrize("work", LOOPS, ids=lambda work: work.__name__)
def test_a_loop_is_replayed(pair, work):
    for seed in range(30):  # as many as addresses of the host may take to come back
        pair.step(seed, work)
    before = pair.graphs.replays
    pair.step(30, work)
    assert pair.graphs.replays > before and not pair.graphs.refused, pair.graphs


def test_loops_in_turn_with_tensors_that_are_kept(pair):
    kept, before = [], pair.graphs.replays
    for seed in range(6 * len(LOOPS)):
        pair.step(seed, LOOPS[seed % len(LOOPS)])
        grads = [each.grad for each in pair.ours.parameters() if each.grad is not None]
        kept += [(each, each.clone()) for each in grads[:2]]
        if seed % 7 == 6:
            weight = pair.ours.up.weight
            weight.data = weight.data.clone()
    pair.optimizers[0].zero_grad()
    assert all(torch.equal(now, then) for now, then in kept[-8:])
    assert pair.graphs.replays > before + 60 and not pair.graphs.refused, pair.graphs


def test_gradients_that_are_kept_stay_as_they_are(pair):
    kept, before = [], pair.graphs.replays
    for seed in range(20):
        pair.ours.zero_grad()
        pair.ours(pair.batch(seed)).square().sum().backward()
        kept += [(each.grad, each.grad.clone()) for each in pair.ours.parameters()]
    assert all(torch.equal(now, then) for now, then in kept)
    assert pair.graphs.replays > before + 15
    pair.eager.load_state_dict(pair.ours.state_dict())
    pair.ours.zero_grad()
    pair.eager.zero_grad()


def test_hooks_on_gradients_and_saved_tensors(pair):
    handles, packed, before = [], [], pair.graphs.replays
    for module in (pair.ours, pair.eager):
        handles.append(module.up.weight.register_hook(lambda grad: grad * 2))
        handles.append(module.down.weight.register_hook(lambda grad: grad.add_(1)))

    def pack(tensor):
        packed.append((tensor, tensor.clone()))
        return tensor

    def hooked(module, optimizer):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
            return plain(module, optimizer)

    for seed in range(10):
        pair.step(seed, hooked)
    for handle in handles:
        handle.remove()
    assert pair.graphs.replays > before + 5


def test_sizes_that_come_back_are_recorded():
    pair = Pair(dynamic=True)
    for seed in range(60):
        pair.step(seed, lambda module, optimizer, rows=(5, 9, 14)[seed % 3]: plain(module, optimizer, rows))
    entry = stats(pair.ours).entries[0]
    assert len(entry.bound) >= 3 and pair.graphs.recordings >= 6
    assert pair.graphs.replays > 60 and not pair.graphs.refused, pair.graphs


def test_it_is_switched_off_and_on_without_compiling_anew(pair):
    for seed in range(8):
        pair.step(seed, plain)
    (entry, _), replays = stats(pair.ours).entries, pair.graphs.replays
    assert replays and all("replays of" in told for told in (repr(stats(pair.ours)), str(explain(pair.ours))))
    add_tvm_dispatch(pair.ours, pair.batch(0), cuda_graphs=False, on_miss="error")
    pair.step(8, plain)
    assert pair.graphs.replays == replays and stats(pair.ours).entries[0] is entry
    add_tvm_dispatch(pair.ours, pair.batch(0), cuda_graphs=True, on_miss="error")
    pair.step(9, plain)
    assert pair.graphs.replays > replays


def test_removing_the_dispatch_frees_it():
    pair = Pair()
    for seed in range(8):
        pair.step(seed, plain)
    graphs = pair.graphs
    assert graphs.held_bytes
    remove_tvm_dispatch(pair.ours)
    gc.collect()
    assert not graphs.held_bytes and not graphs.recordings


@pytest.mark.parametrize("wrong", [None, 1, "always"])
def test_another_mode_is_refused(wrong):
    with pytest.raises(ValueError, match="cuda_graphs: wanted one of 'auto', True, False"):
        add_tvm_dispatch(Layer(), torch.randn(3, 24), cuda_graphs=wrong)
