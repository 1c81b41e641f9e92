"""CUDA's attention kernels as library functions: their arguments, here with formulas in their place."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autodiff.library import LEARNED
from bridge import add_tvm_dispatch, stats
from bridge.compile import CallLibrary, Launch
from bridge.library import FUNCTIONS, attention
from bridge.library.attention import FORMULA, KERNELS, SUMS, AttentionKernel

SCALE = 0.3


@pytest.fixture
def seen(monkeypatch):
    """Replaces the kernels by formulas; the tensors that these get."""
    given = []

    def kernel(name, function):
        def run(*args):
            given.append((name, [arg for arg in args if isinstance(arg, torch.Tensor)]))
            return function(*args)

        return run

    kernels = {name: AttentionKernel(kernel(name, FORMULA.forward), kernel(name, FORMULA.backward)) for name in KERNELS}
    monkeypatch.setattr(attention, "_kernel", lambda name, q: kernels[name])
    return given


def tensors(dtype=torch.float64, columns=7):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    mask = torch.randn(5, columns, generator=generator).to(dtype)
    return q, torch.cat([k, k], 2)[:, :, :columns], torch.cat([v, v], 2)[:, :, :columns], mask


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_backward_of_a_named_kernel(name, masked, seen):
    q, k, v, mask = tensors()
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, mask if masked else None, scale=SCALE)
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, leaves, grad)
    rest = [1, mask, 0, SCALE] if masked else [0, 0, SCALE]
    out, logsumexp = FUNCTIONS["attention"](name, q, k, v, *rest)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    ours = FUNCTIONS["attention_backward"](name, grad.transpose(1, 2), q, k, v, out, logsumexp, *rest)
    torch.testing.assert_close(tuple(each.transpose(1, 2) for each in ours), grads)
    assert [each for each, _ in seen] == [name, name]


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_a_learned_mask(causal):
    q, k, v, mask = tensors(columns=5)
    leaves = [each.clone().requires_grad_() for each in (q, k, v, mask.expand(2, 3, 5, 5))]
    seen = leaves[3].masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf) if causal else leaves[3]
    expected = F.scaled_dot_product_attention(*leaves[:3], seen, scale=SCALE)
    grad = torch.randn_like(expected)
    rest = [LEARNED, leaves[3].detach(), int(causal), SCALE]
    out, logsumexp = FUNCTIONS["attention"]("efficient", q, k, v, *rest)
    *ours, of_mask = FUNCTIONS["attention_backward"]("efficient", grad.transpose(1, 2), q, k, v, out, logsumexp, *rest)
    found = (*(each.transpose(1, 2) for each in ours), of_mask)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_given_what_they_read(dtype, seen):
    """Dense columns, and masks whose rows begin at multiples of 16 bytes; conforming tensors are not copied."""
    q, k, v, mask = tensors(dtype)
    turned = q.mT.contiguous().mT
    for bias in (mask, mask[0].expand(5, 7), torch.zeros(5, 16, dtype=dtype)[:, :7], mask.mT.contiguous().mT):
        FUNCTIONS["attention"]("efficient", turned, k, v, 1, bias, 0, SCALE)
        _, (given_q, _, given_v, given_bias) = seen[-1]
        assert given_q.stride(-1) == 1 and torch.equal(given_q, q) and given_v.data_ptr() == v.data_ptr()
        assert torch.equal(given_bias, bias) and given_bias.stride(-1) == 1
        assert not given_bias.stride(-2) * given_bias.element_size() % 16
        fits = bias.stride(-1) == 1 and not bias.stride(0) * bias.element_size() % 16
        assert (given_bias.data_ptr() == bias.data_ptr()) == fits


CALLS = {
    "flash": lambda *given, p: torch.ops.aten._scaled_dot_product_flash_attention(*given, p, scale=SCALE),
    "efficient": lambda *given, p: torch.ops.aten._scaled_dot_product_efficient_attention(
        *given, None, False, p, scale=SCALE
    ),
    "cudnn": lambda *given, p: torch.ops.aten._scaled_dot_product_cudnn_attention(*given, None, False, p, scale=SCALE),
}


class Fused(nn.Module):
    """Heads lie side by side in each row, as a layer's projections make them."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, q, k, v):
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return torch.tanh(CALLS[self.kernel](q, k, v, p=0.0)[0].transpose(1, 2))


@pytest.fixture
def on_the_host(monkeypatch):
    """The forward kernels run on the host; results get eager's layout after the program, as on a GPU."""
    monkeypatch.setattr("bridge.dispatch.results.memory_orders", lambda *_: ())
    library = torch.library.Library("aten", "IMPL")

    def put(name, more):
        def compute(q, k, v, *rest, scale=None, **_):
            mask = rest[0] if rest and isinstance(rest[0], torch.Tensor) else None
            out, logsumexp = FORMULA.forward(q, k, v, mask, False, scale)
            sums = SUMS[name](logsumexp).float()
            return out, sums[..., :0] if name == "efficient" and not rest[1] else sums, *more(q)

        library.impl(f"_scaled_dot_product_{name}_attention", compute, "CPU")

    def unsigned(*shape):
        return torch.zeros(shape, dtype=torch.uint64)

    def seeds():
        return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)

    put("flash", lambda q: (None, None, 5, 5, unsigned(2), unsigned(), q.new_empty(0)))
    put("efficient", lambda q: seeds())
    put("cudnn", lambda q: (None, None, 5, 5, *seeds(), None))
    yield
    library._destroy()


@pytest.mark.cpu("kernels for the CPU under the names of CUDA's")
@pytest.mark.parametrize("name", KERNELS)
def test_a_traced_kernel_is_called_forward_and_backward(name, on_the_host):
    q, k, v = (each.transpose(1, 2).contiguous() for each in tensors(torch.float32, 5)[:3])
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    heads = [each.transpose(1, 2) for each in leaves]
    expected = torch.tanh(F.scaled_dot_product_attention(*heads, scale=SCALE)).transpose(1, 2)
    module = add_tvm_dispatch(Fused(name), tuple(each.clone().requires_grad_() for each in (q, k, v)))
    ours = [each.clone().requires_grad_() for each in (q, k, v)]
    result = module(*ours)
    torch.testing.assert_close(result, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(result, ours, grad), torch.autograd.grad(expected, leaves, grad))
    (entry,) = stats(module).entries
    calls = [step for program in (entry.forward, entry.backward) for step in program.steps]
    assert [step.name for step in calls if isinstance(step, CallLibrary)] == ["attention", "attention_backward"]
    assert not any("copy" in step.ops for step in calls if isinstance(step, Launch))


class Learned(nn.Module):
    """A learned bias of all scores, and a constant mask added to it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 5, 5))

    def forward(self, q, k, v, mask):
        bias = (self.bias.sin() + mask).expand(2, 3, 5, 5)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=SCALE)[0]


@pytest.mark.cpu("kernels for the CPU under the names of CUDA's")
@pytest.mark.parametrize("learned", [True, False])
def test_the_gradient_of_a_mask_is_computed_where_it_is_learned(learned, on_the_host):
    q, k, v = (each.requires_grad_() for each in tensors(torch.float32, 5)[:3])
    eager, mask = Learned(), torch.randn(5, 5)
    eager.bias.requires_grad_(learned)
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, (q, k, v, mask))
    expected = F.scaled_dot_product_attention(q, k, v, (eager.bias.sin() + mask).expand(2, 3, 5, 5), scale=SCALE)
    result, grad = module(q, k, v, mask), torch.randn_like(expected)
    torch.testing.assert_close(result, expected)
    found = torch.autograd.grad(result, [q, k, v, *([module.bias] if learned else [])], grad)
    torch.testing.assert_close(
        found, torch.autograd.grad(expected, [q, k, v, *([eager.bias] if learned else [])], grad)
    )
    (entry,) = stats(module).entries
    (call,) = [step for step in entry.backward.steps if isinstance(step, CallLibrary)]
    assert call.name == "attention_backward" and len(call.outputs) == 3 + learned


@pytest.mark.parametrize("causal", [False, True])
def test_the_formula_of_grouped_heads(causal):
    """The formula that ``check`` computes, differentiated by torch here."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 8, generator=generator, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE, enable_gqa=True)
    grad = torch.randn_like(expected)
    out, sums = FORMULA.forward(q, k, v, None, causal, SCALE)
    torch.testing.assert_close(out, expected)
    found = FORMULA.backward(grad, q, k, v, None, out, sums, causal, SCALE)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [q, k, v], grad))


def lying(x, order):
    """A tensor of equal numbers, with memory in another order of the dimensions."""
    back = [order.index(axis) for axis in range(x.ndim)]
    return x.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_cudnns_backward_is_given_plans_of_its_own(batch, drops, monkeypatch):
    """Plans by rate and layouts of q, k and v, none of eager's; tensors with rows outside of heads are not copied."""
    given = []

    def backward(grad_out, q, k, v, out, logsumexp, *rest, **scale):
        given.append((grad_out, q, k, v, rest[7]))
        return q, k, v

    monkeypatch.setattr(attention, "aten", SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward))
    monkeypatch.setattr(attention, "_state_at", lambda device, dropout: dropout.state)
    q, k, v, grad_out = (torch.randn(batch, 3, 5, 8).to(torch.bfloat16) for _ in range(4))
    side_by_side = torch.randn(batch, 5, 3, 16).to(torch.bfloat16)[..., 8:].transpose(1, 2).copy_(v)
    dropout = attention.Dropout(0.1, torch.zeros(2, dtype=torch.uint64)) if drops else None
    out = lying(q, (0, 2, 1, 3))
    KERNELS["cudnn"].backward(grad_out, q, k, side_by_side, None, out, None, False, 0.3, dropout)
    ((seen_grad, seen_q, seen_k, seen_v, rate),) = given
    assert all(map(torch.equal, (seen_grad, seen_q, seen_k, seen_v), (grad_out, q, k, v)))
    assert seen_grad.stride() == seen_q.stride() == (120, 8, 24, 1) and seen_v is side_by_side
    if drops:
        assert rate == 0.1 and seen_k.stride() == ((160, 8, 32, 1) if batch > 1 else (128, 8, 24, 1))
    else:
        assert rate == 0 and math.copysign(1, rate) == -1


def test_keys_of_one_batch_lie_apart_without_a_copy():
    keys = lying(torch.randn(1, 3, 5, 8).to(torch.bfloat16), (0, 2, 1, 3))
    apart = attention._apart(keys)
    assert apart.data_ptr() == keys.data_ptr() and torch.equal(apart, keys) and apart.stride() != keys.stride()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)])
@pytest.mark.parametrize("columns", [8, 5])
def test_copies_of_any_layout(columns, order):
    x = lying(torch.randn(2, 3, 5, columns).to(torch.bfloat16), order)
    for first in range(3):
        for moved in (attention._apart(x[:, first:]), attention._rows_outside(x[:, first:])):
            assert torch.equal(moved, x[:, first:])
