"""In-kernel draws on a GPU, by eager's kernels from eager's state: attention's dropout, computed parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Function, clone_tree
from tests.bridge.rng.test_computed_draws import DISTRIBUTIONS, DRAWS, NUMBERS
from tests.device import DEVICE, generators, moved
from tests.gpu.cases import LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]

KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": "bool"},
    "bias": {"attn_mask": "float"},
    "grouped heads": {"enable_gqa": True},
    "longer keys": {},
}
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = {
    "eager's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Attending(nn.Module):
    """Attention with dropout between other draws; ``options``: of attention."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, mask=None):
        q = F.dropout(q, 0.1) + torch.rand_like(q[:, :, :, :1])
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.2, **self.options)
        y = F.scaled_dot_product_attention(y + torch.randn_like(y), k * 2, F.dropout(v, 0.3), mask, 0.1, **self.options)
        return F.dropout(y, 0.1)


def leaves(kind, dtype, width=32):
    made = torch.Generator().manual_seed(0)
    heads, keys = 2 if kind == "grouped heads" else 4, 72 if kind == "longer keys" else 40
    shapes = (2, 40, 4, width), (2, keys, heads, width), (2, keys, heads, width)  # as a layer's projections lie
    tensors = [torch.randn(*shape, generator=made).to(DEVICE, dtype).transpose(1, 2) for shape in shapes]
    mask = torch.rand(2, 1, 40, keys, generator=made).to(DEVICE)
    masks = {"mask": [mask > 0.3], "bias": [mask.to(dtype)]}.get(kind, [])
    return [each.requires_grad_() for each in tensors], masks


def steps(module, kind, dtype, width, count=3):
    """Results, gradients and generators of several steps from one seed."""
    torch.manual_seed(7)
    found = []
    for _ in range(count):
        tensors, masks = leaves(kind, dtype, width)
        y = module(*tensors, *masks)
        y.backward(torch.cos(torch.arange(y.numel(), device=DEVICE)).to(dtype).view_as(y))
        found.append(([y.detach(), *(each.grad for each in tensors)], generators()))
    return found


def assert_alike(found, wanted, dtype, tolerance=None):
    tolerance = tolerance or {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)
    for (got, state), (want, expected) in zip(found, wanted, strict=True):
        assert torch.equal(state, expected)
        for one, other in zip(got, want, strict=True):
            scale = other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_drops_as_eagers(kind, backend, dtype):
    options = {name: value for name, value in KINDS[kind].items() if name != "attn_mask"}
    eager, ours = Attending(**options), Attending(**options)
    chosen = list(SDPBackend.__members__.values())[1:] if BACKENDS[backend] is None else [BACKENDS[backend]]
    with sdpa_kernel(chosen):
        try:
            wanted = steps(eager, kind, dtype, 32)
        except RuntimeError as error:
            pytest.skip(f"eager: {str(error).splitlines()[0][:60]}")
        tensors, masks = leaves(kind, dtype, 32)
        before = generators()
        add_tvm_dispatch(ours, (*tensors, *masks))
        assert torch.equal(generators(), before), "adding the dispatch moved a generator"
        assert_alike(steps(ours, kind, dtype, 32), wanted, dtype)
        assert stats(ours).hits == 3, stats(ours)
        with torch.no_grad():
            add_tvm_dispatch(ours, (*tensors, *masks))
            found = []
            for module in (ours, eager):
                torch.manual_seed(7)
                found.append([([module(*tensors, *masks)], generators()) for _ in range(2)])
        assert_alike(*found, dtype)
    assert stats(ours).hits == 5, stats(ours)


@pytest.mark.parametrize("width", [7, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_many_widths(width, dtype):
    eager, ours = Attending(), Attending()
    wanted = steps(eager, "plain", dtype, width)
    add_tvm_dispatch(ours, tuple(leaves("plain", dtype, width)[0]))
    assert_alike(steps(ours, "plain", dtype, width), wanted, dtype)
    assert stats(ours).hits == 3, stats(ours)


def test_bits_of_the_forward_are_eagers():
    class Alone(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    for dtype in TYPES:
        tensors, _ = leaves("plain", dtype)
        eager, ours = Alone(), Alone()
        add_tvm_dispatch(ours, tuple(tensors))
        found = []
        for module in (eager, ours):
            torch.manual_seed(2**63 + 99)
            found.append([module(*tensors) for _ in range(2)])
        if dtype in (torch.float32, torch.float64):  # by products
            torch.testing.assert_close(*found)
        else:
            assert all(map(torch.equal, *found)), dtype


def mean_square(x):
    """The root of it."""
    return x.double().square().mean().sqrt().item()


HOW = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast bfloat16": (torch.float32, torch.bfloat16),
    "autocast float16": (torch.float32, torch.float16),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [name for name in LAYERS if "p=0.1" in name])
def test_a_layer_of_bert(name, how):
    """Outputs, every gradient and the generators of several steps.

    In half types eager rounds between operators that are one kernel here: the largest of a tensor's differences may be
    some roundings, their root mean square is less than one. The loss has random weights: a sum of ordered ones cancels.
    """
    (make, sample), (dtype, cast) = LAYERS[name], HOW[how]
    torch.manual_seed(0)
    eager = make().to(DEVICE, dtype).train()
    ours, x = copy.deepcopy(eager), clone_tree(moved(sample()), dtype)
    with torch.autocast("cuda", dtype=cast, enabled=cast is not None):
        add_tvm_dispatch(ours, x)
    scaler = torch.amp.GradScaler("cuda", enabled=cast == torch.float16)
    found = []
    made = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = made.to(DEVICE, torch.float64 if how == "float64" else torch.float32)
    for module in (ours, eager):
        torch.manual_seed(11)
        found.append([])
        for _ in range(3):
            module.zero_grad()
            leaf = x.detach().clone().requires_grad_()
            with torch.autocast("cuda", dtype=cast, enabled=cast is not None):
                y = module(leaf)
                y = y if isinstance(y, torch.Tensor) else y[0]
            loss = (y.to(weights.dtype) * weights).sum() / 1024  # a square is the same for all after a norm
            scaler.scale(loss).backward()
            grads = [leaf.grad, *(p.grad.clone() for p in module.parameters())]
            found[-1].append((y.detach(), grads, generators()))
    assert stats(ours).hits == 3, stats(ours)
    tolerance = {"float64": 1e-12, "float32": 1e-5}.get(how, 3e-2)
    for (y, grads, state), (wanted, expected, drawn) in zip(*found, strict=True):
        assert torch.equal(state, drawn)
        largest = max(map(mean_square, expected))
        names = "the result", "x", *(name for name, _ in eager.named_parameters())
        for name, got, want in zip(names, (y, *grads), (wanted, *expected), strict=True):
            if name.endswith("key.bias"):  # which no weight depends on: roundings are all of its gradient
                assert max(mean_square(got), mean_square(want)) <= 1e-2 * largest
            else:
                assert mean_square(got - want) <= tolerance * max(mean_square(want), 1e-2 * largest), name


WAYS = {
    "no mask is kept": {"partition": "recompute_all"},
    "all is kept": {"partition": "save_all"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_partitions(way, dtype):
    eager, ours = Attending(), Attending()
    wanted = steps(eager, "plain", dtype, 32)
    add_tvm_dispatch(ours, tuple(leaves("plain", dtype)[0]), **WAYS[way])
    assert_alike(steps(ours, "plain", dtype, 32), wanted, dtype)


def forked(module, *tensors):
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.cuda.manual_seed(77)
        y = module(*tensors)
    return y + module(*tensors)


STATES = {
    "fork_rng": forked,
    "checkpoint": lambda module, *x: checkpoint(module, *x, use_reentrant=False) + torch.rand_like(x[0]),
    "reentrant checkpoint": lambda module, *x: checkpoint(module, *x, use_reentrant=True) + torch.rand_like(x[0]),
    "reseeded between": lambda module, *x: module(*x) + (torch.cuda.manual_seed(9) or module(*x)),
    "two before one backward": lambda module, *x: module(*x) * module(*x),
}


@pytest.mark.parametrize("way", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_that_others_move(way, dtype):
    eager, ours = Attending(), Attending()
    add_tvm_dispatch(ours, tuple(leaves("plain", dtype)[0]))
    with torch.no_grad():
        add_tvm_dispatch(ours, tuple(leaves("plain", dtype)[0]))
    found = [steps(lambda *x, m=m: STATES[way](m, *x), "plain", dtype, 32) for m in (ours, eager)]
    assert_alike(*found, dtype)
    assert stats(ours).hits and not stats(ours).misses, stats(ours)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_second_gpu(dtype):
    """While the first is current: its own generator moves, and no other does."""
    second = torch.device("cuda", 1)
    eager, ours = Attending(), Attending()
    tensors = [each.detach().to(second).requires_grad_() for each in leaves("plain", dtype)[0]]
    add_tvm_dispatch(ours, tuple(tensors))
    found = []
    for module in (ours, eager):
        torch.manual_seed(7)
        found.append([])
        for _ in range(3):
            y = module(*tensors)
            grads = torch.autograd.grad(y.float().square().sum(), tensors)
            state = torch.cat([torch.cuda.get_rng_state(index) for index in range(2)])
            found[-1].append(([y.detach(), *grads], state))
    assert_alike(*found, dtype)
    assert stats(ours).hits == 3, stats(ours)


def test_another_choice_is_another_entry():
    """The switches of attention's kernels are conditions of an entry."""
    ours, eager = Attending(), Attending()
    tensors, _ = leaves("plain", torch.bfloat16)
    add_tvm_dispatch(ours, tuple(tensors), on_miss="compile")
    for kernel in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel([kernel]):
            assert_alike(*(steps(m, "plain", torch.bfloat16, 32) for m in (ours, eager)), torch.bfloat16)
    assert stats(ours).hits == 9, stats(ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted({*DRAWS, *NUMBERS, *DISTRIBUTIONS} - {"Beta of numbers"}))  # of the host
def test_computed_draws_are_eagers(name, dtype):
    function = {**DRAWS, **NUMBERS, **DISTRIBUTIONS}[name]
    ours, eager = Function(function), Function(function)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype).requires_grad_()
    add_tvm_dispatch(ours, x)
    found = []
    for module in (ours, eager):
        torch.manual_seed(2**63 + 5)
        found.append([])
        for _ in range(3):
            y = module(x)
            grads = torch.autograd.grad(y.sum(), [x]) if y.requires_grad else []
            found[-1].append(([y.detach(), *grads], generators()))
    assert_alike(*found, dtype, 1e-9 if dtype == torch.float64 else 1e-4)
    assert stats(ours).hits == 3 and not stats(ours).misses, stats(ours)


def test_an_unused_computed_draw_moves_the_generator():
    def forward(x):
        torch.poisson(x.exp())
        return torch.rand_like(x) * x

    ours, eager, x = Function(forward), Function(forward), torch.randn(9, device=DEVICE)
    add_tvm_dispatch(ours, x)
    found = []
    for module in (ours, eager):
        torch.manual_seed(3)
        found.append([([module(x)], generators()) for _ in range(3)])
    assert_alike(*found, torch.float32)
    assert stats(ours).hits == 3


def test_what_eager_refuses_is_eagers_error():
    ours, x = Function(lambda x: torch.multinomial(x, 9)), torch.rand(4, 5, device=DEVICE)
    with pytest.raises((RuntimeError, UnsupportedModule)):
        add_tvm_dispatch(ours, x)


def test_a_host_computed_draw_is_refused_by_name():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * torch.bernoulli(torch.rand(4)).to(x.device)

    with pytest.raises(UnsupportedModule, match="on the host"):
        add_tvm_dispatch(copy.deepcopy(Both()).to(DEVICE), torch.ones(2, 4, device=DEVICE))
