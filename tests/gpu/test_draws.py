"""Random draws on a GPU beside eager's: bits, generator offsets, layouts, several devices, states that others move.

Masks are compared twice: by the kernels that compute them (:mod:`bridge.compile.codegen.philox`), and as torch draws
them for a program that stores them. 1e8 elements and more over types, odd sizes and misaligned views.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tvm import relax

from bridge import add_tvm_dispatch, stats
from bridge.base.generators import default_generator
from bridge.capture import Draw, DropoutOperand
from bridge.capture.draws import IsolatedRNG
from bridge.compile import CompileOptions, DrawnMask, backend_for, compile_function, gpu_of
from bridge.rng import Draws, checked_gpu
from bridge.rng.computed import NATIVE_DROPOUT
from tests.device import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]
HOME = DEVICE if DEVICE.index is not None else torch.device(DEVICE.type, 0)

SIZES = [
    *(1, 2, 3, 4, 6, 7, 8, 10, 255, 256, 257, 1001, 4093, 270336, 1001 * 777, 131071 * 33, 270336 * 4 + 4),
    *(270336 * 8, 270336 * 8 + 8, 270336 * 12 + 2, 32 * 328 * 768, 2 * 1000003, 5 * 1000001),
]


@pytest.fixture(scope="module")
def gpu():
    found = checked_gpu(HOME)
    assert found is not None, "the check against eager fails on this GPU: masks are stored"
    return found


def width_of(count: int, address: int, size: int) -> int:
    width = 16 // size
    while width > 1 and (count % width or address % (width * size)):
        width //= 2
    return width


@functools.cache
def dropped_by_us(count: int, rate: float, width: int, threads: int):
    """A program that says which of so many elements are dropped, by a kernel of this package."""
    mask = relax.Var("mask", relax.TensorType((count,), "bool"))
    builder = relax.BlockBuilder()
    with builder.function("main", [mask]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.logical_not(mask))
        builder.emit_func_output(relax.Tuple([result]))
    drawn = {0: DrawnMask(rate, width, threads)}
    options = CompileOptions.current(backend_for(HOME))
    return compile_function(builder.get()["main"], name="mask", options=options, drawn=drawn)


def state() -> tuple[int, int]:
    generator = default_generator(HOME)
    return generator.initial_seed(), generator.get_offset()


def test_the_launch_is_that_of_this_gpu(gpu):
    assert gpu == gpu_of(HOME) and gpu.most_threads % 256 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_computed_bits_and_offsets(gpu, dtype):
    """Three draws after each other of every size, from aligned and misaligned memory; says how many elements."""
    wrong, elements, offsets = 0, 0, 0
    torch.manual_seed(0xDEADBEEF12345678)
    for place, count in enumerate(SIZES):
        rate = (0.1, 0.5, 0.15)[place % 3]
        for first in (0, 1, 2, 4) if count < 3_000_000 else (0,):
            x = torch.randn(count + first, device=HOME, dtype=dtype)[first:]
            width = width_of(count, x.data_ptr(), x.element_size())
            program = dropped_by_us(count, rate, width, gpu.launched(count))
            for _ in range(3):
                before = state()
                y, mask = torch.native_dropout(x, rate, True)
                (dropped,) = program([torch.tensor(before, dtype=torch.uint64)])
                wrong += int((dropped == mask).sum())
                offsets += state()[1] != before[1] + gpu.advance(count)
                elements += count
            forward = torch.tensor(1, dtype=torch.float32) / torch.tensor(1 - rate, dtype=torch.float32)
            assert torch.equal(y, (x.float() * mask.float() * forward.to(HOME)).to(dtype)), (count, rate)
    print(f"\n{dtype}: {elements} elements, {wrong} wrong bits, {offsets} wrong offsets")
    assert not wrong and not offsets


def test_more_elements_than_a_short_index_reaches(gpu):
    """Masks of so many elements are stored; the formula holds there as well."""
    count, rate = 2**31 + 8, 0.1
    if torch.cuda.mem_get_info(HOME)[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    before = state()
    mask = torch.native_dropout(torch.empty(count, device=HOME, dtype=torch.bfloat16), rate, True)[1]
    assert state()[1] == before[1] + gpu.advance(count)
    (dropped,) = dropped_by_us(count, rate, 8, gpu.launched(count))([torch.tensor(before, dtype=torch.uint64)])
    assert not torch.eq(dropped, mask).any()


LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "a slice": lambda x: x[:, 1:, 3:],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "from the fourth byte on": lambda x: x.flatten()[2:-2].view(2, -1),
    "odd": lambda x: x[:3, :5, :7],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_by_torch_are_eagers_in_every_layout(layout, dtype):
    """An observed dropout is drawn again for another tensor of its layout: the same bits and offset."""
    memory = torch.randn(4, 64, 96, device=HOME, dtype=dtype)
    x = LAYOUTS[layout](memory)
    operand = DropoutOperand(dtype, x.stride(), x.storage_offset() * x.element_size(), 0)
    draw = Draw(NATIVE_DROPOUT, tuple(x.shape), x.stride(), torch.bool, (0.3, True), (), HOME, operand)
    draws = Draws([draw] * 2, [0, 1], [0, 1], "Dropped", device=HOME)
    found = []
    for make in (lambda: [torch.native_dropout(x, 0.3, True)[1] for _ in range(2)], lambda: draws.make([memory])):
        torch.manual_seed(5)
        torch.rand(77, device=HOME)
        found.append((*make(), torch.cuda.get_rng_state(HOME)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


class Drawing(nn.Module):
    """Every kind of draw, some unused, some on the CPU; dropout of views, inputs and odd sizes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(96, 96)

    def forward(self, x):
        y = F.dropout(self.linear(x), 0.1) + F.dropout(x, 0.2)
        F.dropout(y, 0.5)
        y = y + 0.1 * torch.randn_like(y) * torch.rand(3, 1, 96, device=y.device)
        y = y * torch.empty_like(y[..., :1]).bernoulli_(0.7) + torch.empty_like(y).uniform_(-1, 1)
        torch.rand(5)
        index = torch.randint(0, 96, (y.shape[-1],), device=y.device)
        y = F.dropout(y.transpose(0, 1), 0.15).transpose(0, 1)[..., index]
        scores = F.dropout((y @ y.transpose(-1, -2)).softmax(-1), 0.1)
        return F.dropout1d(scores @ y, 0.3) + F.dropout((scores @ y)[:, 1:, 3:], 0.25).sum()


def states() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(HOME)


def trained(module, x, *, calls=3, run=lambda module, x: module(x)):
    torch.manual_seed(4)
    found = []
    for _ in range(calls):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(module, leaf)
        y.float().square().mean().backward()
        found += [y.detach(), leaf.grad, module.linear.weight.grad.clone(), *states()]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [16, 17])
def test_a_module_with_draws_of_every_kind(dtype, rows):
    torch.manual_seed(0)
    eager = Drawing().to(HOME, dtype).train()
    ours, x = copy.deepcopy(eager), torch.randn(3, rows, 96, device=HOME, dtype=dtype)
    before = states()
    add_tvm_dispatch(ours, x.clone().requires_grad_())
    assert all(map(torch.equal, states(), before)), "adding the dispatch moved a generator"
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for got, wanted in zip(trained(ours, x), trained(eager, x), strict=True):
        if wanted.dtype == torch.uint8:
            assert torch.equal(got, wanted)
        else:
            scale = tolerance * wanted.abs().max().item()
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=scale)
    assert stats(ours).hits == 3, stats(ours)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(96, 96)

    def forward(self, x):
        return F.dropout(self.linear(F.dropout(x * 2, 0.1)).softmax(-1), 0.2)


def pair(dtype=torch.float32):
    torch.manual_seed(0)
    eager = Dropped().to(HOME, dtype).train()
    ours, x = copy.deepcopy(eager), torch.randn(4, 33, 96, device=HOME, dtype=dtype)
    add_tvm_dispatch(ours, x.clone().requires_grad_())
    return eager, ours, x


def test_no_mask_is_stored(gpu):
    _, ours, _ = pair()
    (entry,) = stats(ours).entries
    for program in (entry.forward, entry.backward):
        assert not [each for each in program.layout.params if each.dtype == "bool"], program
    assert "dropout_mask_4" in str(entry.forward) and "dropout_mask_4" in str(entry.backward)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 96))

    def forward(self, x):
        return F.dropout(F.dropout(x, 0.2).sin() * self.weight, 0.3).square()


class Read(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_of_an_argument_from_any_place(dtype, gpu):
    """Where torch allocates, the kernel computes the mask; from elsewhere eager takes other numbers, and runs."""
    ours, memory = Read(), torch.randn(4 * 33 * 96 + 8, device=HOME, dtype=dtype)
    add_tvm_dispatch(ours, memory[:-8].view(4, 33, 96).clone().requires_grad_())
    (entry,) = stats(ours).entries
    for program in (entry.forward, entry.backward):
        assert "dropout_mask" in str(program)
    for first in range(9):
        x, found = memory[first : len(memory) - 8 + first].view(4, 33, 96).detach().requires_grad_(), []
        for module in (ours, Read()):
            torch.manual_seed(first)
            y = module(x)
            found.append((y == 0, torch.autograd.grad(y.sum(), x)[0] == 0, *states()))
        assert all(map(torch.equal, *found)), first
    hits = 3 if dtype == torch.float32 else 2
    assert stats(ours).hits == hits and all(reason.startswith("alignment of") for reason in stats(ours).misses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_gradients_have_the_masks_of_the_call(dtype, gpu):
    """Dropout of an argument, in the caller's memory, and of a computed value."""
    torch.manual_seed(0)
    eager = Twice().to(HOME, dtype)
    ours, x, found = copy.deepcopy(eager), torch.randn(5, 33, 96, device=HOME, dtype=dtype).requires_grad_(), []
    add_tvm_dispatch(ours, x)
    assert "dropout_mask" in str(stats(ours).entries[0].forward)
    for module in (ours, eager):
        torch.manual_seed(6)
        y = module(x)
        before = states()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append([y, slope, *torch.autograd.grad(slope.sin().sum(), [x, module.weight]), *before])
        assert all(map(torch.equal, states(), before))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())
    assert all(torch.equal(got == 0, wanted == 0) for got, wanted in zip(*(each[:2] for each in found), strict=True))
    assert stats(ours).hits == stats(ours).eager_backwards.total() == 1


def forked(module, x):
    with torch.random.fork_rng(devices=[HOME.index]):
        torch.cuda.manual_seed(77)
        y = module(x)
    return y + module(x)


def interleaved(module, x):
    y = module(x)
    torch.rand(100, device=HOME)
    return y + module(F.dropout(x, 0.5))


WAYS = {
    "plain": lambda module, x: module(x),
    "fork_rng": forked,
    "between eager's draws": interleaved,
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False) + torch.rand_like(x),
    "reentrant checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True) + torch.rand_like(x),
    "reseeded": lambda module, x: torch.cuda.manual_seed(9) or module(x) + module(x),
    "on a side stream": lambda module, x: on_a_side_stream(module, x),
}


def on_a_side_stream(module, x):
    stream = torch.cuda.Stream(HOME)
    stream.wait_stream(torch.cuda.current_stream(HOME))
    with torch.cuda.stream(stream):
        y = module(x)
    torch.cuda.current_stream(HOME).wait_stream(stream)
    return y


@pytest.mark.parametrize("way", WAYS)
def test_states_that_others_move(way):
    eager, ours, x = pair()
    found = [trained(module, x, run=WAYS[way]) for module in (ours, eager)]
    for got, wanted in zip(*found, strict=True):
        if wanted.dtype == torch.uint8:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_zeros_lie_where_eagers_do():
    eager, ours, x = pair(torch.bfloat16)
    for seed in range(5):
        torch.manual_seed(seed)
        wanted = eager(x)
        torch.manual_seed(seed)
        assert torch.equal(ours(x) == 0, wanted == 0)


def test_a_call_that_fails_leaves_the_generator():
    class Reads(nn.Module):
        def forward(self, x, flag):
            y = F.dropout(x * 2, 0.5) + torch.rand_like(x)
            return y * 2 if flag.sum() > 3 else y + torch.rand(1)[0]

    ours, eager, x = Reads(), Reads(), torch.randn(40, 3, device=HOME)
    add_tvm_dispatch(ours, (x, torch.ones(5, device=HOME)))
    for flag in (torch.ones(5, device=HOME), torch.zeros(5, device=HOME)):
        found = []
        for module in (eager, ours):
            torch.manual_seed(2)
            found.append((module(x, flag), *states()))
        assert all(map(torch.equal, *found))
    assert sum(stats(ours).misses.values()) == 1


def test_a_users_cuda_graph_is_eagers():
    """A program that reads the generator's state is not captured: the call is eager's, whose draws a graph replays."""
    _, ours, x = pair()
    with torch.no_grad():
        ours.eval()(x)
        ours.train()
        stream = torch.cuda.Stream(HOME)
        with torch.cuda.stream(stream):
            for _ in range(3):
                ours(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(x)
        graph.replay()
        first = y.clone()
        graph.replay()
    assert not torch.equal(first == 0, y == 0)


def test_isolation_leaves_a_gpus_generator_alone():
    before = states()
    with IsolatedRNG():
        x = torch.rand(4, 5, device=HOME)
        F.dropout(x, 0.5), torch.randn_like(x), torch.randperm(9, device=HOME), torch.native_dropout(x, 0.5, True)
        x.normal_(), torch.multinomial(x.exp(), 2), torch.rand(3)
    assert all(map(torch.equal, states(), before))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_its_generator():
    other = torch.device("cuda", 1 - HOME.index)
    torch.manual_seed(0)
    eager = Dropped().to(other).train()
    ours, x = copy.deepcopy(eager), torch.randn(4, 33, 96, device=other)
    add_tvm_dispatch(ours, x)
    found = []
    for module in (eager, ours):
        torch.manual_seed(3)
        torch.rand(math.prod(x.shape), device=HOME)
        y = module(x)
        found.append((y.cpu(), *(torch.cuda.get_rng_state(device) for device in (HOME, other))))
    assert torch.equal(found[0][0] == 0, found[1][0] == 0)
    assert all(map(torch.equal, found[0][1:], found[1][1:])) and stats(ours).hits == 1
