"""Attention in float32 by products where eager takes its efficient kernel: numbers, gradients, draws beside eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridge import add_tvm_dispatch, stats
from bridge.compile import CallLibrary
from bridge.dispatch import recompute
from tests.device import DEVICE, generators
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU

SHAPES = [
    ((2, 3, 37), 45, 32),
    ((4, 12, 128), 128, 64),
    ((1, 2, 1), 9, 8),
    ((1, 1, 197), 197, 64),
    ((2, 2, 64), 328, 64),
]
MASKS = ["none", "causal", "bool", "float", "nothing to attend to", "the lowest number"]


class Attention(nn.Module):
    """Attention that drops between two dropouts, and one that does not."""

    def __init__(self, width, causal):
        super().__init__()
        self.linear, self.causal = nn.Linear(width, width), causal

    def forward(self, q, k, v, mask=None):
        q = F.dropout(self.linear(q), 0.1)
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.2, is_causal=self.causal)
        y = F.dropout(y, 0.3)
        return F.scaled_dot_product_attention(y, k, v, mask, is_causal=self.causal)


def sample(shape, columns, width, kind):
    rows = shape[-1]
    torch.manual_seed(0)
    sizes = [(*shape, width), *((*shape[:2], columns, width),) * 2]
    given = [torch.randn(size, device=DEVICE).requires_grad_() for size in sizes]
    if kind in ("none", "causal"):
        return given
    hidden = torch.rand(shape[0], 1, rows, columns, device=DEVICE) < 0.3
    hidden[..., 0] = False
    if kind == "bool":
        return [*given, ~hidden]
    mask = torch.randn(shape[0], 1, rows, columns, device=DEVICE)
    if kind != "float":
        low = -torch.inf if "attend" in kind else torch.finfo(torch.float32).min
        mask = torch.zeros_like(mask).masked_fill(hidden, low)
        mask[:, :, rows // 2] = low
    return [*given, mask]


def step(module, given, seed):
    torch.manual_seed(seed)
    y = module(*given)
    found = torch.autograd.grad(y.square().sum(), [*given[:3], *module.parameters()])
    return [y.detach(), *found], generators()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("stored", [False, True], ids=["computed", "stored"])
def test_a_step_is_eagers(sizes, kind, stored, monkeypatch):
    if stored:
        monkeypatch.setattr(recompute, "recomputed_mask", lambda draw, gpu: None)
    given = sample(*sizes, kind)
    eager = Attention(sizes[2], kind == "causal").to(DEVICE)
    ours = copy.deepcopy(eager)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        add_tvm_dispatch(ours, tuple(given))
        for seed in range(3):
            (wanted, drawn), (found, moved) = step(eager, given, seed), step(ours, given, seed)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            assert torch.equal(drawn, moved)
    (entry,) = stats(ours).entries
    called = [each.name for each in (*entry.forward.steps, *entry.backward.steps) if isinstance(each, CallLibrary)]
    assert not [name for name in called if "attention" in name], called
    assert ("dropout_mask_0" in str(entry.forward)) is not stored
    assert stats(ours).hits == 3 and not stats(ours).misses


def test_gradients_that_autograd_follows_have_the_masks_of_the_call():
    """By eager's operators, from the generator's states before the call's own draws."""
    eager = Attention(32, False).to(DEVICE)
    ours, given, found = copy.deepcopy(eager), sample((2, 3, 37), 45, 32, "none"), []
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        add_tvm_dispatch(ours, tuple(given))
        for module in (ours, eager):
            torch.manual_seed(2)
            y = module(*given)
            before = generators()
            found.append(torch.autograd.grad(y.square().sum(), [*given, *module.parameters()], create_graph=True))
            assert torch.equal(generators(), before)
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert stats(ours).hits == stats(ours).eager_backwards.total() == 1


def test_sizes_that_vary():
    eager = Attention(32, False).to(DEVICE)
    ours = copy.deepcopy(eager)
    rows = torch.export.Dim("rows", min=2, max=300)
    given = sample((2, 3, 40), 40, 32, "none")
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        add_tvm_dispatch(ours, tuple(given), dynamic_shapes=({2: rows},) * 3)
        for seed in range(24):
            given = sample((2, 3, (40, 13, 128, 77)[seed % 4]), (40, 13, 128, 77)[seed % 4], 32, "none")
            (wanted, drawn), (found, moved) = step(eager, given, seed), step(ours, given, seed)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            assert torch.equal(drawn, moved)
    assert not stats(ours).misses and stats(ours).hits == 24


def test_who_forbids_the_formula_gets_the_kernel():
    given = sample((2, 3, 16), 16, 32, "none")
    ours = Attention(32, False).to(DEVICE)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        add_tvm_dispatch(ours, tuple(given))
        ours(*given)
    names = [each.name for each in stats(ours).entries[0].forward.steps if isinstance(each, CallLibrary)]
    assert "dropping_attention" in names
