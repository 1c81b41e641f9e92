"""CUDA graphs beside eager: dropout bits, generator offsets, parameters and gradients over loops of every kind."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge import add_tvm_dispatch, stats
from bridge.compile import gpu_of
from bridge.compile.cuda.driver_graphs import captured, new_stream
from bridge.rng.states import GeneratorStates
from tests.device import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]


class Layer(nn.Module):
    """Products, a norm, two dropouts, a buffer that is written."""

    def __init__(self, width: int = 96):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        h = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + F.dropout(self.down(h), 0.1, self.training)


class Pair:
    """A dispatched module and eager's, fed alike; generators are compared after each step."""

    def __init__(self, mode=True, rows: int = 33, dtype=torch.float64):
        torch.manual_seed(0)
        self.ours = Layer().cuda().to(dtype)
        self.eager = copy.deepcopy(self.ours)
        self.rows, self.dtype = rows, dtype
        add_tvm_dispatch(self.ours, self.batch(0), cuda_graphs=mode)
        self.ours.eval()
        with torch.no_grad():
            add_tvm_dispatch(self.ours, self.batch(0), cuda_graphs=mode)
        self.ours.train()
        self.optimizers = [torch.optim.SGD(each.parameters(), 1e-4, momentum=0.9) for each in self.both]

    @property
    def both(self):
        return self.ours, self.eager

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.rows, 96, generator=generator).to("cuda", self.dtype).requires_grad_()

    def step(self, seed, work):
        """``work(module, optimizer)`` for both, from one state of the generator."""
        made, offsets = [], []
        for module, optimizer in zip(self.both, self.optimizers, strict=True):
            torch.manual_seed(seed)
            made.append(work(module, optimizer))
            offsets.append(torch.cuda.default_generators[0].get_offset())
        assert offsets[0] == offsets[1]
        self.same(made)

    def same(self, made):
        for ours, theirs in zip(*made, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(*(each.state_dict().values() for each in self.both), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(*(each.parameters() for each in self.both), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)

    @property
    def graphs(self):
        return stats(self.ours).graphs


def train(pair, seed, **given):
    def work(module, optimizer):
        optimizer.zero_grad(**given)
        x = pair.batch(seed)
        y = module(x)
        y.square().mean().backward()
        optimizer.step()
        return [y.detach(), x.grad]

    pair.step(seed, work)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_are_replays_and_eagers(set_to_none):
    pair = Pair()
    for seed in range(20):
        train(pair, seed, set_to_none=set_to_none)
    assert not stats(pair.ours).misses and not pair.graphs.refused, pair.graphs
    assert pair.graphs.replays > 15, pair.graphs


def test_mixed_steps():
    """Two forwards before a backward, accumulation, gradients that are kept, evaluation, moved parameters, in turn."""
    pair, kept = Pair(), []

    def two(module, optimizer):
        optimizer.zero_grad()
        a, b = pair.batch(1), pair.batch(2)
        one, other = module(a), module(b)
        (one.square().sum() + other.sum()).backward()
        optimizer.step()
        return [one.detach(), other.detach(), a.grad, b.grad]

    def crossed(module, optimizer):
        a, b = pair.batch(3), pair.batch(4)
        one, other = module(a), module(b)
        one.square().sum().backward()
        other.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [a.grad, b.grad]

    def accumulated(module, optimizer):
        optimizer.zero_grad()
        for part in range(3):
            module(pair.batch(part)).square().sum().backward()
        optimizer.step()
        return []

    def evaluated(module, optimizer):
        module.eval()
        with torch.no_grad():
            y = module(pair.batch(5))
        module.train()
        return [y]

    def checkpointed(module, optimizer):
        optimizer.zero_grad()
        x = pair.batch(6)
        y = checkpoint(module, x, use_reentrant=False)
        y.square().sum().backward()
        optimizer.step()
        return [y.detach(), x.grad]

    def moved(module, optimizer):
        with torch.no_grad():
            module.up.weight.data = module.up.weight.data.clone()
        return []

    def held(module, optimizer):
        optimizer.zero_grad()
        y = module(pair.batch(7))
        y.square().sum().backward()
        if module is pair.ours:
            for tensor in (y, *(parameter.grad for parameter in module.parameters())):
                kept.append((tensor, tensor.detach().clone()))
        return [y.detach()]

    works = [two, crossed, accumulated, evaluated, checkpointed, held]
    for seed in range(54):
        pair.step(seed, works[seed % len(works)])
        if seed % 18 == 17:
            pair.step(seed, moved)
    assert all(torch.equal(now, then) for now, then in kept)
    assert not pair.graphs.refused and pair.graphs.replays > 60, pair.graphs


def test_memory_is_flat():
    pair = Pair(dtype=torch.float32)
    x = pair.batch(0)

    def steps(count):
        for _ in range(count):
            pair.optimizers[0].zero_grad()
            pair.ours(x).square().mean().backward()
            pair.optimizers[0].step()

    steps(20)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pair.graphs.held_bytes
    steps(100)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pair.graphs.held_bytes) == before
    assert pair.graphs.held_bytes > 0 and pair.graphs.recordings


def test_replays_give_the_bits_of_single_launches():
    pair, bits = Pair(dtype=torch.float32), []
    x = pair.batch(0)
    for _ in range(12):
        torch.manual_seed(5)
        pair.ours.zero_grad()
        y = pair.ours(x)
        y.square().sum().backward()
        bits.append([y.detach().clone(), *(each.grad.clone() for each in pair.ours.parameters())])
        pair.ours.mean.zero_()
    assert pair.graphs.replays > 10
    assert all(torch.equal(a, b) for run in bits[1:] for a, b in zip(bits[0], run, strict=True))


def test_a_side_stream_still_reads_what_was_let_go():
    """A tensor that another stream was told to use is not written before that stream is done with it."""
    pair = Pair(dtype=torch.float32)
    x, side = pair.batch(0), torch.cuda.Stream()
    with torch.no_grad():
        pair.ours.eval()
        for _ in range(10):
            pair.ours(x)
        wanted = pair.ours(x).clone()
        y = pair.ours(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            read = y.clone()
        y.record_stream(side)
        del y
        with torch.no_grad():
            x.zero_()
        for _ in range(4):
            pair.ours(x)
        torch.cuda.synchronize()
    assert torch.equal(read, wanted)


def test_automatic_follows_what_is_measured():
    small, large = Pair("auto", rows=8, dtype=torch.float32), Pair("auto", rows=1 << 17, dtype=torch.float32)
    for seed in range(12):
        for pair in (small, large):
            pair.ours(pair.batch(seed)).sum().backward()
            torch.cuda.synchronize()
    assert small.graphs.replays, small.graphs
    assert large.graphs.refused and not large.graphs.replays, large.graphs


def test_a_users_own_graph_around_a_recorded_module():
    pair = Pair(dtype=torch.float32)
    x = pair.batch(0).detach()
    pair.ours.eval()
    with torch.no_grad():
        for _ in range(8):
            pair.ours(x)
        wanted = pair.ours(x + 1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pair.ours(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = pair.ours(x)
        x.add_(1)
        graph.replay()
    torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_states_of_masks_are_the_generators(seed):
    """On the device as on the host, at any offset, on several streams, with tables that are used again."""
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [(3, 5), (700, 999), (1 << 22,)]
    advances = [gpu_of(device).advance(torch.Size(shape).numel()) for shape in shapes]
    given = {"device": device, "dtype": torch.float32}
    there = GeneratorStates([SimpleNamespace(**given, shape=shape, is_placed=False) for shape in shapes])
    here = GeneratorStates([SimpleNamespace(**given, advance=advance, is_placed=True) for advance in advances])
    generator = torch.cuda.default_generators[device.index]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for offset in (0, 4, 2**40, 2**62):
                generator.manual_seed(seed)
                generator.set_offset(offset)
                made = there.draw(None, [])
                assert generator.get_offset() == offset + sum(advances)
                generator.set_offset(offset)
                for ours, expected in zip(made, here.draw(None, []), strict=True):
                    assert torch.equal(ours.cpu(), expected.view(torch.int64))


@pytest.fixture
def side():
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.ExternalStream(new_stream(), device)


def test_a_capture_that_fails_leaves_nothing_behind(side):
    """Draws, memory and captures after it are as ever."""
    x = torch.randn(64, device="cuda")
    torch.mul(x, 2)
    for wrong in (lambda: x.sum().item(), lambda: torch.rand(3, device="cuda"), lambda: 1 / 0):
        generator = torch.cuda.default_generators[x.device.index]
        torch.manual_seed(3)
        expected = torch.rand(5, device="cuda")
        state = generator.get_state()
        with pytest.raises((RuntimeError, ZeroDivisionError)), torch.cuda.stream(side):
            with captured(side.cuda_stream):
                torch.mul(x, 2)
                wrong()
        assert torch.equal(generator.get_state(), state) and not torch.cuda.is_current_stream_capturing()
        torch.manual_seed(3)
        assert torch.equal(torch.rand(5, device="cuda"), expected)
        out = torch.empty_like(x)
        with torch.cuda.stream(side), captured(side.cuda_stream) as made:
            torch.mul(x, 3, out=out)
        made[0].launcher(torch.cuda.current_stream().cuda_stream)()
        assert torch.equal(out, x * 3)


def test_other_threads_draw_and_allocate_during_a_capture(side):
    x, out, drawn = torch.randn(64, device="cuda"), torch.empty(64, device="cuda"), []
    torch.mul(x, 2)
    torch.manual_seed(3)
    expected = torch.rand(5, device="cuda")
    torch.manual_seed(3)

    def other():
        drawn.extend([torch.rand(5, device="cuda"), torch.empty(1 << 24, device="cuda")])

    with torch.cuda.stream(side), captured(side.cuda_stream) as made:
        torch.mul(x, 3, out=out)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert torch.equal(drawn[0], expected)
    made[0].launcher(torch.cuda.current_stream().cuda_stream)()
    assert torch.equal(out, x * 3)


def test_draws_of_the_user_between_replays():
    """After recordings the generator is as ever."""
    pair = Pair(dtype=torch.float32)

    def drawing(module, optimizer):
        module.zero_grad()
        x = pair.batch(1) + torch.rand(33, 96, device="cuda")
        y = F.dropout(module(x), 0.3)
        y.square().sum().backward()
        return [torch.rand(4, device="cuda")]

    for seed in range(12):
        offsets = []
        for module in pair.both:
            torch.manual_seed(seed)
            drawing(module, None)
            offsets.append(torch.cuda.default_generators[0].get_offset())
        assert offsets[0] == offsets[1]
    assert pair.graphs.replays > 6 and not pair.graphs.refused, pair.graphs
