"""Programs on a GPU among others' work: streams, devices, capture, memory, profilers; torch's attention kernels."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile import Launch
from bridge.compile.cuda.executor import POOLS
from bridge.compile.cuda.nvrtc import disassembler
from bridge.library import FUNCTIONS
from bridge.library.attention import FORMULA, KERNELS
from bridge.library.registry import ALIGNMENT, invoke
from tests.device import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]


class Block(nn.Module):
    """Products, a reduction over rows, several over columns in the backward."""

    def __init__(self, width: int = 96):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture
def block():
    torch.manual_seed(0)
    module, x = Block().cuda(), torch.randn(33, 96, device="cuda")
    expected = module(x)
    add_tvm_dispatch(module, x)
    return module, x, expected


def check(module, x, expected):
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_a_program_runs_and_says_its_sources(block):
    module, x, expected = block
    check(module, x, expected)
    (entry,) = stats(module).entries
    assert stats(module).hits == 1 and not stats(module).misses
    (name, *_) = entry.forward.kernels
    assert "__global__" in entry.forward.source(name, "cuda") and ".target" in entry.forward.source(name, "ptx")
    assert all(entry.forward.launches(step) for step in entry.forward.steps if isinstance(step, Launch))
    if disassembler():
        assert "EXIT" in entry.forward.source(name, "sass")


def test_runs_give_the_same_bits(block):
    module, x, _ = block
    runs = []
    for _ in range(5):
        module.zero_grad()
        y = module(x)
        y.square().sum().backward()
        runs.append([y.detach(), *(parameter.grad.clone() for parameter in module.parameters())])
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))


def test_work_is_on_the_current_stream(block):
    """Behind a long kernel on a side stream, while the default stream is idle; streams share no blocks."""
    module, x, expected = block
    check(module, x, expected)
    side, source = torch.cuda.Stream(), torch.zeros_like(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        source.copy_(x)
        made = module(source)
        done = side.record_event()
    assert not done.query()
    torch.cuda.current_stream().wait_event(done)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    assert not stats(module).misses
    used = {stream for _, stream in POOLS._pools}
    assert side.cuda_stream in used and len(used) > 1


def test_streams_at_the_same_time(block):
    module, x, _ = block
    inputs = [x * factor for factor in range(1, 5)]
    expected = [module(each) for each in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        made = []
        for stream, each in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                made.append(module(each))
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
    assert not stats(module).misses


def test_an_input_off_16_bytes(block):
    module, x, expected = block
    apart = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)
    assert apart.data_ptr() % ALIGNMENT
    check(module, apart, expected)


def test_a_users_own_graph(block):
    """Captured without gradients: replays follow the input, also when others have used the pools since."""
    module, x, _ = block
    other = torch.randn_like(x)
    with torch.no_grad():
        add_tvm_dispatch(module, x)
        wanted = module(other)
        held = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                module(held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = module(held)
        SESSION.reset("programs")
        gc.collect()
        held.copy_(other)
        filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        graph.replay()
        torch.cuda.synchronize()
    assert filler and torch.equal(result, wanted) and not stats(module).misses


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one():
    torch.manual_seed(0)
    module, x = Block().to("cuda:1"), torch.randn(33, 96, device="cuda:1")
    expected = module(x)
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    assert torch.cuda.current_device() == 0 and stats(module).hits == 1
    check(module, x, expected)


@torch.no_grad()
def test_memory_that_ran_out():
    """torch's error; nothing is held; the next call is fine."""
    module, x = Block().cuda(), torch.randn(1 << 16, 96, device="cuda")
    expected = module(x)
    add_tvm_dispatch(module, x)
    check(module, x, expected)
    SESSION.reset("programs")
    gc.collect()
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 22)) / total)
    others = []
    try:
        with pytest.raises(torch.OutOfMemoryError):
            while True:  # fills the free parts of segments with others' tensors
                others.append(torch.empty(1 << 22, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            module(x)
        others.clear()
        gc.collect()  # the error's frames
        SESSION.reset("programs")  # the pool's free block
        assert torch.cuda.memory_allocated() <= held  # less where garbage of another test has gone meanwhile
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    check(module, x, expected)
    assert stats(module).hits >= 2


def test_ranges_under_a_profiler(block):
    module, x, _ = block
    module(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x)
    names = {event.name for event in profile.events()}
    assert any(name.startswith("tvm: Block") and "/k0" in name for name in names)
    with torch.autograd.profiler.emit_nvtx():
        module(x)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_kernels(name, masked):
    """Of half types beside the formula in float64, views and odd lengths among them."""
    if masked and name == "flash":
        pytest.skip("takes no mask")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, 37, 3, 64, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    mask = torch.randn(2, 3, 37, 37, generator=generator, device="cuda").bfloat16() if masked else None
    rest = [1, mask, 0, 0.125] if masked else [0, 0, 0.125]
    wide = [each.double() for each in (q, k, v)]
    exact, sums = FORMULA.forward(*wide, None if mask is None else mask.double(), False, 0.125)
    out, logsumexp = FUNCTIONS["attention"](name, q, k, v, *rest)
    torch.testing.assert_close(out.transpose(1, 2).double(), exact, rtol=2e-2, atol=2e-2)
    backward = (None if mask is None else mask.double(), exact, sums, False, 0.125)
    expected = FORMULA.backward(grad.double(), *wide, *backward)
    made = FUNCTIONS["attention_backward"](name, grad.transpose(1, 2), q, k, v, out, logsumexp, *rest)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2).double(), theirs, rtol=3e-2, atol=3e-2)
        assert ours.is_contiguous()  # as the kernel leaves it: nothing is copied


class Attention(nn.Module):
    """Fused attention of heads that lie apart, or side by side in each row as a layer's projections do."""

    def __init__(self, is_causal: bool, side_by_side: bool):
        super().__init__()
        self.is_causal, self.side_by_side = is_causal, side_by_side

    def forward(self, *given):
        q, k, v = (each.transpose(1, 2) for each in given) if self.side_by_side else given
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side_by_side", [False, True])
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_scaled_dot_product_attention_is_eagers_kernel(dtype, is_causal, side_by_side):
    module, eager = Attention(is_causal, side_by_side), Attention(is_causal, side_by_side)
    for rows in (64, 37):
        q, k, v = (torch.randn(2, 4, rows, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
        expected = eager(q, k, v)
        cotangent = torch.randn_like(expected)
        grads = torch.autograd.grad(expected, (q, k, v), cotangent)
        add_tvm_dispatch(module, (q, k, v))
        made = module(q, k, v)
        assert torch.equal(made, expected)
        for ours, eagers in zip(torch.autograd.grad(made, (q, k, v), cotangent), grads, strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-2, atol=1e-2 * eagers.abs().max().item())
    assert stats(module).hits == 2


def test_library_results_begin_where_vectors_may():
    x = torch.randn(3, 5, device="cuda")
    made = invoke(lambda given: tuple(given.unbind(0)), [x[0:3]], [x])
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in made)
    assert all(torch.equal(each, row) for each, row in zip(made, x, strict=True))
