"""Attention by products in place of the efficient kernel: eager's numbers, gradients, masks and generator.

Without a GPU: the kernel's stand-in on the host draws by the GPU's rule (:mod:`tests.philox`), and decisions are made
as if tensors were on a GPU.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.capture import draws as captured_draws
from bridge.compile import IN_A_ROW, CallLibrary, DrawnMask
from bridge.dispatch import recompute
from bridge.library import attention
from bridge.rng import draws
from tests import philox
from tests.bridge.library import test_dropping_attention
from tests.sampling import sampled

pytestmark = pytest.mark.cpu("kernels for the CPU under the names of CUDA's")

CUDA = torch.device("cuda", 0)
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention

BY_PRODUCTS = captured_draws.attends_by_products


def on_gpu(operator, query, key, value, rate=0.0):
    """The rule's answer for tensors on the host, as if they were on a GPU."""
    forms = [SimpleNamespace(shape=each.shape, dtype=each.dtype, device=CUDA) for each in (query, key, value)]
    return BY_PRODUCTS(operator, *forms, rate)


generator = test_dropping_attention.generator
"""The fixture."""


@pytest.fixture
def products(generator, monkeypatch):
    """A generator; the kernel on the host draws from it as a GPU's, and products replace it where they would there."""

    def kept(weights, dropout):
        if dropout is None:
            return 1.0
        seed, offset = dropout.state.tolist()
        mask = torch.from_numpy(philox.mask_in_a_row(weights.numel(), dropout.rate, seed, offset))
        return mask.view(weights.shape).to(weights.dtype) / (1 - dropout.rate)

    monkeypatch.setattr(generator, "advance", lambda _, q, k: -(-q.shape[:3].numel() * k.shape[2] // 4) * 4)
    monkeypatch.setattr(attention, "_noise", kept)
    monkeypatch.setattr(captured_draws, "attends_by_products", on_gpu)
    monkeypatch.setattr("bridge.aten.nn.attends_by_products", on_gpu)
    return generator


@pytest.fixture(params=["stored", "computed"])
def masks(products, monkeypatch, request):
    """Masks that torch draws before a call, or that kernels compute from the generator's state."""
    if request.param == "computed":

        class States:
            def __init__(self, drawn):
                self.advances = [draw.advance for draw in drawn]

            def draw(self, given, inputs):
                found = []
                for advance in self.advances:
                    found.append(products.get_state().view(torch.uint64).clone())
                    products.offset += advance
                return found

        def rule(draw, gpu):
            return DrawnMask(draw.args[0], IN_A_ROW, 1) if draw.is_attention_mask else None

        monkeypatch.setattr(recompute, "recomputed_mask", rule)
        monkeypatch.setattr(draws, "GeneratorStates", States)
    return request.param


class Attending(nn.Module):
    """Two attentions of different rates; the first reads a product."""

    def __init__(self, width=8, rates=(0.3, 0.5)):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.rates = nn.Linear(width, width), rates

    def forward(self, q, k, v):
        first, second = self.rates
        x = EFFICIENT(self.linear(q), k, v, None, True, first, scale=0.3)[0]
        return torch.tanh(EFFICIENT(x, k * 2, v, None, True, second, scale=0.3)[0])


def leaves(rows=5, columns=7, width=8):
    made = torch.Generator().manual_seed(1)
    sizes = (rows, columns, columns)
    return [torch.randn(2, 3, size, width, generator=made).requires_grad_() for size in sizes]


def step(module, generator, given):
    y = module(*given)
    found = torch.autograd.grad(y.square().sum(), [*given, module.linear.weight])
    return [y.detach(), *found, generator.get_state().view(torch.int64)]


@pytest.mark.parametrize(
    ("partition", "columns"),
    sampled(itertools.product(("min_cut", "recompute_all"), (7, 8)), [("min_cut", 7), ("recompute_all", 8)]),
)
def test_a_step_is_eagers(masks, products, partition, columns):
    ours, eager, given = Attending(), Attending(), leaves(columns=columns)
    add_tvm_dispatch(ours, tuple(given), partition=partition)
    start = products.offset
    wanted = [step(eager, products, given) for _ in range(3)]
    products.offset = start
    found = [step(ours, products, given) for _ in range(3)]
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    (entry,) = stats(ours).entries
    called = [each.name for each in (*entry.forward.steps, *entry.backward.steps) if isinstance(each, CallLibrary)]
    assert not [name for name in called if "attention" in name], called
    assert ("dropout_mask" in str(entry.forward)) == ("dropout_mask" in str(entry.backward)) == (masks == "computed")
    assert stats(ours).hits == 3 and not stats(ours).misses


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.3, 0.0)], ids=str)
def test_what_the_reference_computes(products, rates):
    module, given = Attending(rates=rates), leaves()
    add_tvm_dispatch(module, tuple(given))
    torch.testing.assert_close(step(module, products, given)[0].shape, given[0].shape)
    lower(module, tuple(given)).check()


@pytest.mark.parametrize(
    "shapes, chosen",
    [
        (((2, 3, 512, 64),) * 3, True),
        (((2, 3, 513, 64),) * 3, False),
        (((1, 1, 1, 8), (1, 1, 40, 8), (1, 1, 40, 8)), True),
        (((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)), False),
        (((2, 4, 0, 8), (2, 4, 16, 8), (2, 4, 16, 8)), False),
    ],
    ids=str,
)
def test_where_products_are_taken(shapes, chosen):
    assert on_gpu(EFFICIENT.default, *map(torch.empty, shapes)) is chosen


def test_where_they_are_not():
    given = [torch.empty(2, 3, 8, 8)] * 3
    assert on_gpu(EFFICIENT.default, *given)
    assert not captured_draws.attends_by_products(EFFICIENT.default, *given)  # on the host
    assert not on_gpu(EFFICIENT.default, *(each.bfloat16() for each in given))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert not on_gpu(EFFICIENT.default, *given)


def test_weights_that_would_fill_the_gpu_are_the_kernels(monkeypatch):
    given = [torch.empty(16, 8, 64, 64)] * 3
    for total, chosen in ((256 * given[0].nbytes, True), (256 * given[0].nbytes - 256, False)):
        monkeypatch.setattr(captured_draws, "memory_of", lambda _, total=total: total)
        assert on_gpu(EFFICIENT.default, *given) is chosen


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min], ids=str)
def test_rows_that_attend_to_nothing_are_zero(products, low):
    """As in the kernel, which raises 2 to scores times ``log2(e)``: the lowest number overflows."""

    class Masked(nn.Module):
        def forward(self, q, k, v, mask):
            return EFFICIENT(q, k, v, mask, True, 0.0, scale=0.3)[0]

    given, mask = leaves(6, 6), torch.zeros(2, 3, 6, 6)
    mask[:, :, 2], mask[:, :, 4, 3:] = low, low
    module = Masked()
    add_tvm_dispatch(module, (*given, mask))
    y = module(*given, mask)
    grads = torch.autograd.grad(y.square().sum(), given)
    exact = torch.where(mask == 0, 0.0, -torch.inf)
    weights = (given[0] @ given[1].mT * 0.3 + exact).softmax(-1).nan_to_num()
    torch.testing.assert_close(y, weights @ given[2], rtol=1e-5, atol=1e-6)
    assert not y[:, :, 2].any() and not grads[0][:, :, 2].any() and all(each.isfinite().all() for each in grads)
    assert stats(module).hits == 1


def test_sums_of_what_drops_are_refused(products):
    class Sums(nn.Module):
        def forward(self, q, k, v):
            y, sums, *_ = EFFICIENT(q, k, v, None, True, 0.3, scale=0.3)
            return y.sum() + sums.sum()

    with pytest.raises(UnsupportedModule, match="logsumexp of attention that drops"):
        add_tvm_dispatch(Sums(), tuple(leaves()))
