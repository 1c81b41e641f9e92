"""Training loops of a module whose programs are recorded, with a recorder on the host: all give eager's numbers."""

from __future__ import annotations

import gc
import random
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, explain, remove_tvm_dispatch, stats
from tests.bridge.dispatch.recorded_loops import LOOPS, Pair, plain

pytestmark = pytest.mark.usefixtures("recorder_on_the_host")


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
    for module in pair.both:
        handles.append(module.up.weight.register_hook(lambda grad: grad * 2))
        handles.append(module.down.weight.register_hook(lambda grad: grad.add_(1)))

    def pack(tensor):
        packed.append((tensor, tensor.clone()))
        return tensor

    def hooked(pair, module, optimizer):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
            return plain(pair, module, optimizer)

    for seed in range(10):
        pair.step(seed, hooked)
    for handle in handles:
        handle.remove()
    assert pair.graphs.replays > before + 5


@pytest.fixture(scope="module")
def varying():
    return Pair(dynamic=True)


def test_sizes_that_come_back_are_recorded(varying):
    """In any order, forward and backward once each: sizes share their history of addresses."""
    order, before = random.Random(0), varying.graphs.recordings
    sizes = [order.randint(3, 20) for _ in range(120)]
    for seed, rows in enumerate(sizes):
        varying.step(seed, partial(plain, rows=rows))
    often = sum(count > 3 for count in Counter(sizes[40:]).values())  # by then memory is as large as it gets
    graphs = varying.graphs
    assert often > 8 and graphs.recordings - before >= 2 * often and not graphs.refused, graphs
    made, replays = graphs.recordings, graphs.replays
    for seed, rows in enumerate(sizes[80:]):
        varying.step(seed, partial(plain, rows=rows))
    assert graphs.replays >= replays + 60 and graphs.recordings <= made + 12, graphs


def test_a_size_that_does_not_come_back_is_not_recorded(varying):
    for seed in range(8):
        varying.step(seed, partial(plain, rows=13))
    before = varying.graphs.recordings
    for rows in range(30, 36):
        varying.step(rows, partial(plain, rows=rows))
    assert varying.graphs.recordings == before


def test_one_that_does_is_recorded_at_its_second_call(varying):
    for rows in range(64, 40, -1):  # until each input has moved that is going to
        for seed in range(2):
            varying.step(seed, partial(plain, rows=rows))
    before = varying.graphs.recordings
    for rows in range(22, 30):
        for seed in range(2):
            varying.step(seed, partial(plain, rows=rows))
    assert varying.graphs.recordings >= before + 12, varying.graphs


def test_it_is_switched_off_and_on_without_compiling_anew(pair):
    for seed in range(8):
        pair.step(seed, plain)
    (entry, _), replays = stats(pair.ours).entries, pair.graphs.replays
    assert replays and all("replays of" in told for told in (repr(stats(pair.ours)), str(explain(pair.ours))))
    pair.dispatch(pair.ours, False)
    pair.step(8, plain)
    assert pair.graphs.replays == replays and stats(pair.ours).entries[0] is entry
    pair.dispatch(pair.ours, True)
    for seed in range(30):  # its inputs may lie where none did
        pair.step(seed, plain)
        if pair.graphs.replays > replays:
            break
    assert pair.graphs.replays > replays and stats(pair.ours).entries[0] is entry


def test_unless_told_otherwise_what_is_launch_bound_is_recorded():
    module, x = nn.Linear(5, 3), torch.randn(4, 5)
    add_tvm_dispatch(module, x)
    for _ in range(100):  # until it is certain
        module(x).sum().backward()
        if stats(module).graphs.replays > 6 and stats(module).graphs.recordings >= 2:
            break
    assert stats(module).graphs.mode == "auto" and stats(module).graphs.recordings >= 2, stats(module).graphs


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
        add_tvm_dispatch(nn.Linear(3, 2), torch.randn(3, 3), cuda_graphs=wrong)


class _Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x):
        return self.layer(x).square().mean()


def test_the_gradient_of_a_loss_may_lie_anywhere():
    """autograd makes it anew at each step: one recording serves all."""
    module, x, kept = _Loss(), torch.randn(5, 24), []
    add_tvm_dispatch(module, x, cuda_graphs=True)
    for seed in range(16):
        module.zero_grad()
        kept.append(torch.tensor(1.0 + seed))
        module(x).backward(kept[-1])
        wanted = torch.autograd.grad(_Loss.forward(module, x), list(module.parameters()), kept[-1])
        for parameter, gradient in zip(module.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    graphs = stats(module).graphs
    assert graphs.recordings == 2 and graphs.ungraphed["addresses that are new"] == 2, graphs
