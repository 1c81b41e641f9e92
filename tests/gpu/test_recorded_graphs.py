"""CUDA graphs beside eager: dropout bits, generator offsets, parameters and gradients over loops of every kind."""

from __future__ import annotations

import copy
import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from bridge.compile import gpu_of
from bridge.compile.cuda.driver_graphs import captured, new_stream
from bridge.compile.cuda.memory import PoolMemory
from bridge.library import INTO_GIVEN
from bridge.rng.engine import GeneratorStates
from tests.bridge.dispatch.recorded_loops import LOOPS, Pair, plain
from tests.device import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_are_replays_and_eagers(set_to_none):
    def work(pair, module, optimizer):
        optimizer.zero_grad(set_to_none=set_to_none)
        x = pair.batch(1)
        y = module(x)
        y.square().mean().backward()
        optimizer.step()
        return [y.detach(), x.grad]

    pair = Pair()
    for seed in range(20):
        pair.step(seed, work)
    assert not stats(pair.ours).misses and not pair.graphs.refused, pair.graphs
    assert pair.graphs.replays > 15, pair.graphs


def test_a_backward_in_the_callers_thread():
    """torch has a thread of its own for a GPU's, unless told otherwise."""
    pair = Pair()
    for seed in range(24):
        with torch.autograd.set_multithreading_enabled(seed % 3 == 0):
            pair.step(seed, plain)
    assert pair.graphs.replays > 20 and not pair.graphs.refused, pair.graphs


def test_mixed_steps():
    """Two forwards before a backward, accumulation, gradients that are kept, evaluation, moved parameters, in turn."""
    pair, kept = Pair(), []

    def moved(pair, module, optimizer):
        with torch.no_grad():
            module.up.weight.data = module.up.weight.data.clone()
        return []

    def held(pair, module, optimizer):
        optimizer.zero_grad()
        y = module(pair.batch(7))
        y.square().sum().backward()
        if module is pair.ours:
            for tensor in (y, *(parameter.grad for parameter in module.parameters())):
                kept.append((tensor, tensor.detach().clone()))
        return [y.detach()]

    works = [*LOOPS, held]
    for seed in range(6 * len(works)):
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

    def held():
        """Without the last step's gradients, which lie elsewhere where it was no replay, and other tests' garbage."""
        pair.optimizers[0].zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pair.graphs.held_bytes

    seen = [held()]
    for _ in range(6):  # tensors that move once other tests' garbage has gone are recorded anew
        steps(100)
        seen.append(held())
        if seen[-1] == seen[-2]:
            break
    assert seen[-1] == seen[-2], seen
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
    small, large = Pair("auto", rows=8, dtype=torch.float32), Pair("auto", rows=1 << 20, dtype=torch.float32)
    for pair in (small, large):
        for seed in range(100):  # beside other processes a verdict may take a while
            if pair.graphs.recordings > 1 or pair.graphs.refused:
                break
            pair.ours(pair.batch(seed)).sum().backward()
            torch.cuda.synchronize()
    assert small.graphs.recordings > 1 and not small.graphs.refused, small.graphs
    assert large.graphs.refused, large.graphs  # one of the two: a host that others keep busy may be the slower one


def test_a_users_own_graph_around_a_recorded_module():
    pair = Pair(dtype=torch.float32)
    x = pair.batch(0)
    pair.ours.eval()
    with torch.no_grad():
        for _ in range(8):
            pair.ours(x)
        wanted = pair.ours((x + 1).requires_grad_())
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
    """States of recomputed masks and of in-kernel draws, at any offset."""
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [(3, 5), (700, 999), (1 << 22,)]
    advances = [gpu_of(device).advance(torch.Size(shape).numel()) for shape in shapes]
    given = {"device": device, "dtype": torch.float32}
    masks = GeneratorStates(
        [SimpleNamespace(**given, shape=shape, is_placed=False, is_attention_mask=False) for shape in shapes]
    )
    placed = GeneratorStates([SimpleNamespace(**given, advance=advance, is_placed=True) for advance in advances])
    generator = torch.cuda.default_generators[device.index]
    for offset in (0, 4, 2**40, 2**62):
        generator.manual_seed(seed)
        generator.set_offset(offset)
        made = masks.draw(None, [])
        assert generator.get_offset() == offset + sum(advances)
        generator.set_offset(offset)
        wanted = [[seed, offset + sum(advances[:place])] for place in range(3)]
        assert [state.tolist() for state in made] == [state.tolist() for state in placed.draw(None, [])] == wanted


@pytest.fixture
def side():
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.ExternalStream(new_stream(), device)


def test_a_capture_that_fails_leaves_nothing_behind():
    """Draws, memory and captures after it are as ever."""
    x = torch.randn(64, device="cuda")
    torch.mul(x, 2)
    for wrong in (lambda: x.sum().item(), lambda: torch.rand(3, device="cuda"), lambda: 1 / 0):
        generator = torch.cuda.default_generators[x.device.index]
        side = torch.cuda.ExternalStream(new_stream(), x.device)
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
        out, other = torch.empty_like(x), torch.cuda.ExternalStream(new_stream(), x.device)
        with torch.cuda.stream(other), captured(other.cuda_stream) as made:
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
        x = pair.batch(1)
        x = x + torch.rand_like(x)
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


def test_threads_share_memory_of_a_pool():
    memory, failed = PoolMemory(torch.cuda.current_device()), []
    forms = [((64,), (1,), torch.float32)] * 20

    def take():
        try:
            for number in range(300):
                made = memory(forms)
                for each in made:
                    each.fill_(number)
                assert all(bool((each == number).all()) for each in made[:2])
        except Exception as error:  # noqa: BLE001 - whatever it is, the test tells it
            failed.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and memory.held_bytes


def test_a_recording_has_no_memory_of_a_users_pool():
    """Made while the user's pool is in use, it replays when the pool is gone and its memory is reused."""
    pair, pool = Pair(dtype=torch.float32), torch.cuda.MemPool()
    pair.ours.eval()
    x = pair.batch(1)
    with torch.no_grad():
        with torch.cuda.use_mem_pool(pool):
            wanted = pair.ours(x).clone()
            for _ in range(12):
                assert torch.equal(pair.ours(x), wanted)
        wanted = wanted.cpu()
        assert pair.graphs.replays or "pool that is not ours" in repr(pair.graphs)  # as torch goes by one or the other
        del pool
        torch.cuda.empty_cache()
        sizes = [1 << 8, 1 << 18, 1 << 21] * 8
        others = [torch.full((size,), torch.nan, device="cuda") for size in sizes]
        for _ in range(12):
            assert torch.equal(pair.ours(x).cpu(), wanted)
    assert all(bool(each.isnan().all()) for each in others)


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_graph_is_let_go_during_a_capture(mode, side):
    """By the thread that captures, and by another one."""
    x = torch.randn(64, device="cuda")
    torch.mul(x, 2)

    def made():
        out = torch.empty_like(x)
        with torch.cuda.stream(side), captured(side.cuda_stream) as graphs:
            torch.mul(x, 2, out=out)
        return graphs

    here, there, out, graph = made(), made(), torch.empty_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        torch.mul(x, 3, out=out)
        here.clear()
        thread = threading.Thread(target=there.clear)
        thread.start()
        thread.join()
        out.add_(1)
    graph.replay()
    assert torch.equal(out, x * 3 + 1)
    again = made()
    with torch.cuda.stream(side), captured(side.cuda_stream) as graphs:
        torch.mul(x, 5, out=out)
        again.clear()
        out.add_(1)
    graphs[0].launcher(torch.cuda.current_stream().cuda_stream)()
    assert torch.equal(out, x * 5 + 1)


def test_a_stream_is_made_in_a_thread_that_has_done_nothing_yet():
    made = []
    thread = threading.Thread(target=lambda: made.append(new_stream()))
    thread.start()
    thread.join()
    assert made and made[0]


def test_a_new_thread_has_handles_of_its_own_before_it_records():
    """Of cuBLAS: to make one takes memory of the device, which no capture allows."""
    pair = Pair()
    for seed in range(3):  # the next call of these addresses is recorded
        pair.step(seed, plain)
    failures = []

    def work():
        try:
            with torch.autograd.set_multithreading_enabled(False):
                for seed in range(12):
                    pair.step(seed, plain)
        except BaseException as error:  # noqa: BLE001 - a thread's errors are told by the test
            failures.append(error)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not failures and not pair.graphs.refused and pair.graphs.replays > 30, (failures, pair.graphs)


def test_what_cublas_works_in_stays_a_recordings():
    """torch.compile's reduce-overhead frees all of it, and a graph of eager's ends the process if its memory was freed.

    Input and gradient keep their addresses. Masks that torch draws for each call do not, once the allocator has freed
    its cache: calls whose masks have a new address run by themselves.
    """
    pair = Pair()
    x, grad = pair.batch(0), pair.batch(1).detach()

    def held(pair, module, optimizer):
        optimizer.zero_grad()
        y = module(x)
        y.backward(grad)
        optimizer.step()
        found, x.grad = x.grad, None
        return [y.detach(), found]

    for seed in range(12):
        pair.step(seed, held)
    replays, moved = pair.graphs.replays, pair.graphs.ungraphed["addresses that are new"]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(8)]
    for seed in range(12):
        pair.step(seed, held)
    replays, moved = pair.graphs.replays - replays, pair.graphs.ungraphed["addresses that are new"] - moved
    assert replays + moved == 24 and replays >= 16 and not pair.graphs.refused, pair.graphs
    assert all(bool(each.isnan().all()) for each in others)


@pytest.fixture
def written(monkeypatch):
    """Library functions that were asked to write into given memory, and whether they did."""
    found = []

    def spied(name, function):
        def write(*given):
            found.append((name, function(*given)))
            return found[-1][1]

        return write

    for name, function in list(INTO_GIVEN.items()):
        monkeypatch.setitem(INTO_GIVEN, name, spied(name, function))
    return found


class LookedUp(nn.Module):
    """By indices that are no tensor of their own."""

    def __init__(self):
        super().__init__()
        self.words, self.rows = nn.Embedding(50, 16), nn.Parameter(torch.randn(50, 16))

    def forward(self, indices):
        return self.words(indices[:, 1:]), self.rows[indices[:, 1:]]


def test_lookups_write_what_a_recording_returns(written):
    torch.manual_seed(0)
    ours = LookedUp().to(DEVICE)
    eager = copy.deepcopy(ours)
    add_tvm_dispatch(ours, torch.zeros(4, 6, dtype=torch.long, device=DEVICE), cuda_graphs=True)
    for _ in range(16):
        indices = torch.randint(0, 50, (4, 6), device=DEVICE)
        results = ours(indices)
        assert all(map(torch.equal, results, eager(indices)))
        sum(each.square().sum() for each in results).backward()
    assert stats(ours).graphs.replays > 8
    assert {name for name, is_done in written if is_done} == {"embedding", "index"}


def test_convolutions_write_what_a_recording_returns(written):
    """In channels_last under autocast: the numbers of single launches, and weights are read where they lie."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3)
    body = nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), second)
    modules = [copy.deepcopy(body).to(DEVICE, memory_format=torch.channels_last) for _ in range(2)]
    x = torch.randn(4, 8, 12, 12, device=DEVICE).to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        for module, graphs in zip(modules, (True, False), strict=True):
            add_tvm_dispatch(module, x, cuda_graphs=graphs)
    held = []
    for seed in range(16):
        torch.manual_seed(seed)
        x.normal_()
        results = []
        for module in modules:
            with torch.autocast("cuda", torch.bfloat16):
                y = module(x)
            module.zero_grad()
            y.float().square().mean().backward()
            results.append([y, *(each.grad for each in module.parameters()), *module.buffers()])
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
        held.append((results[0][0], results[1][0]))
    assert all(torch.equal(ours, single) for ours, single in held)
    graphs = stats(modules[0]).graphs
    assert graphs.replays > 16 and not graphs.refused and graphs.recordings, graphs
    assert {name for name, is_done in written if is_done} >= {"convolution_last", "max_pool_last"}


class Eigenvalues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x @ x.mT)


def test_cusolver_is_not_captured():
    """It fails there, and once more in the call after that: of the program, or of the user."""
    module, x = Eigenvalues().double(), torch.randn(4, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    add_tvm_dispatch(module, x, cuda_graphs=True)
    for _ in range(6):
        made = module(x)
        made.sum().backward()
        torch.testing.assert_close(made, torch.linalg.eigvalsh(x @ x.mT), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 6
    assert "waits for the device" in repr(stats(module).graphs)
