"""Recomputed dropout masks: forward and backward compute them from the generator's state, nothing is stored.

Without a GPU: ``native_dropout`` called by name is observed as a GPU's dropout is, and the state is a made one. The
masks equal the draws of a GPU with few threads (:mod:`tests.philox`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.capture import Draw, DropoutOperand
from bridge.compile import Gpu
from bridge.dispatch import recompute
from bridge.rng import computed, draws
from bridge.rng.computed import NATIVE_DROPOUT
from tests import philox
from tests.sampling import sampled

GPU = Gpu(processors=1, threads=512)
SEED, OFFSET = -(2**63) + 12345, 2**34 - 8


class MadeStates:
    """As :class:`bridge.rng.engine.GeneratorStates`, of a made-up generator."""

    def __init__(self, drawn):
        self.advances = [GPU.advance(torch.Size(draw.shape).numel()) for draw in drawn]

    def draw(self, generator, inputs):
        starts = [OFFSET + sum(self.advances[:place]) for place in range(len(self.advances))]
        return list(torch.tensor([(SEED % 2**64, start) for start in starts], dtype=torch.uint64).unbind())


@pytest.fixture
def computing(monkeypatch):
    """While active, masks of fused dropout on the CPU are computed."""

    def on_gpu(draw, gpu):
        if draw.op != NATIVE_DROPOUT:
            return None
        return computed.recomputed_mask(Draw(**{**vars(draw), "device": torch.device("cuda", 0)}), lambda: GPU)

    monkeypatch.setattr(recompute, "recomputed_mask", on_gpu)
    monkeypatch.setattr(draws, "GeneratorStates", MadeStates)
    monkeypatch.setattr("bridge.dispatch.dispatcher.measure_profitability", lambda *_: None)


class Dropped(nn.Module):
    """Softmax and normalization with dropout around; masks drawn by torch among them.

    ``given``: masks to take instead, in order.
    """

    def __init__(self, given=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.given = given

    def drop(self, x, rate):
        if self.given is None:
            return torch.native_dropout(x, rate, True)[0]
        return x * next(self.given).view(x.shape) / (1 - rate)

    def forward(self, x):
        scores = self.drop(torch.bmm(x, x.transpose(1, 2)).softmax(-1), 0.1)
        y = F.dropout(self.linear(torch.bmm(scores, x)), 0.25)
        return self.drop(self.norm(x + self.drop(y, 0.15)).tanh(), 0.4), scores


def masks(batch, rows):
    """The masks of a call, in the order of the draws; dropouts whose mask torch draws separate the runs."""
    offset, made = OFFSET, []
    for count, rate, first in (
        (batch * rows * rows, 0.1, True),
        (batch * rows * 8, 0.15, True),
        (batch * rows * 8, 0.4, False),
    ):
        offset = OFFSET if first else offset
        width = next(width for width in (4, 2, 1) if count % width == 0)
        kept = philox.mask(count, rate, width, philox.launched(count, GPU.most_threads), SEED, offset)
        made.append(torch.from_numpy(kept))
        offset += philox.advance(count, GPU.most_threads)
    return iter(made)


def step(module, x):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    y, scores = module(x)
    (y.square().sum() + scores.sin().sum()).backward()
    return [y.detach(), scores.detach(), x.grad, *(p.grad for p in module.parameters()), torch.get_rng_state()]


def check(ours, x):
    for parameter in ours.parameters():
        parameter.grad = None
    wanted = step(Dropped(masks(*x.shape[:2])), x)
    for got, expected in zip(step(ours, x), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.cpu("a made generator, whose states lie on the host")
@pytest.mark.parametrize("partition", sampled(["min_cut", "recompute_all", "save_all"], ["min_cut", "recompute_all"]))
def test_forward_and_backward_compute_the_same_masks(computing, partition):
    torch.manual_seed(1)
    ours, x = Dropped(), torch.randn(3, 14, 8)
    add_tvm_dispatch(ours, x.clone().requires_grad_(), partition=partition)
    check(ours, x)
    (entry,) = stats(ours).entries
    saved = [tuple(each.shape) for each in entry.forward.layout.params if each.lies_on_host]
    assert saved == [(2,)] * 3 and "dropout_mask_4" in str(entry.backward)
    assert not [each for each in entry.backward.layout.params if each.dtype == "bool" and len(each.shape) > 2][1:]
    assert stats(ours).hits == 1


class Read(nn.Module):
    """Dropout of an argument, read in its memory layout."""

    def forward(self, x, y):
        return torch.native_dropout(x, 0.25, True)[0] + y


def beginning(first, shape=(6, 8)):
    """Numbers that begin so many elements behind the begin of an allocation."""
    count = torch.Size(shape).numel()
    return torch.ones(first + count)[first:].view(shape)


@pytest.mark.cpu("a made generator, whose states lie on the host")
@pytest.mark.parametrize("shape, widths", [((6, 8), (4, 1, 2)), ((5, 2), (2, 1, 2)), ((3, 5), (1, 1, 1))])
def test_masks_of_arguments_are_those_of_their_alignment(computing, shape, widths):
    """A call whose argument begins elsewhere is eager's, where eager's kernel takes other numbers for it."""
    ours, y = Read(), torch.zeros(shape)
    add_tvm_dispatch(ours, (beginning(0, shape), y))
    (entry,) = stats(ours).entries
    assert f"dropout_mask_{widths[0]}" in str(entry.forward)
    hits = 0
    for first, width in zip((0, 1, 2), widths, strict=True):
        made = ours(beginning(first, shape), y)
        hits += width == widths[0]
        assert stats(ours).hits == hits
        if width == widths[0]:
            count = made.numel()
            kept = philox.mask(count, 0.25, width, philox.launched(count, GPU.most_threads), SEED, OFFSET)
            assert torch.equal(made != 0, torch.from_numpy(kept).view(shape))
    reasons = [reason for reason in stats(ours).misses if reason.startswith("alignment of args[0]")]
    assert sum(stats(ours).misses[reason] for reason in reasons) == 3 - hits == sum(stats(ours).misses.values())


@pytest.mark.cpu("a made generator, whose states lie on the host")
def test_masks_of_a_sample_from_an_odd_place_are_stored(computing):
    ours, y = Read(), torch.zeros(6, 8)
    add_tvm_dispatch(ours, (beginning(1), y))
    (entry,) = stats(ours).entries
    assert "dropout_mask" not in str(entry.forward)
    for first in (1, 0):
        x, found = beginning(first), []
        for module in (ours, Read()):
            torch.manual_seed(0)
            found.append(module(x, y))
        assert torch.equal(*found)
    assert stats(ours).hits == 2


@pytest.mark.cpu("a made generator, whose states lie on the host")
def test_sizes_that_vary(computing):
    torch.manual_seed(1)
    ours, x = Dropped(), torch.randn(3, 12, 8)
    add_tvm_dispatch(ours, x.clone().requires_grad_(), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    for batch in (3, 5, 40):
        check(ours, torch.randn(batch, 12, 8))
    assert stats(ours).hits == 3 and len(stats(ours).entries) == 1


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "shape, operand, width",
    [
        ((4, 6), DropoutOperand(torch.float32, (6, 1)), 4),
        ((4, 6), DropoutOperand(torch.bfloat16, (6, 1)), 8),
        ((3, 2), DropoutOperand(torch.float16, (2, 1)), 2),
        ((3, 5), DropoutOperand(torch.float32, (5, 1)), 1),
        ((4, 6), DropoutOperand(torch.float32, (6, 1), 8), 2),
        ((4, 6), DropoutOperand(torch.float16, (6, 1), 40), 4),
        ((4, 1, 6), DropoutOperand(torch.float32, (6, 77, 1)), 4),
        ((4, 6), DropoutOperand(torch.float64, (6, 1)), None),
        ((4, 6), DropoutOperand(torch.float32, (1, 4)), None),
        ((4, 6), DropoutOperand(torch.float32, (6, 1), 0, 2), 4),
        ((4, 6), DropoutOperand(torch.float32, (6, 1), 8, 2), 2),
        ((2**16, 2**15), DropoutOperand(torch.float32, (2**15, 1)), None),
    ],
)
def test_which_masks_are_computed(shape, operand, width):
    draw = Draw(NATIVE_DROPOUT, shape, operand.stride, torch.bool, (0.1, True), (), CUDA, operand)
    found = computed.recomputed_mask(draw, lambda: GPU)
    assert (found and found.width) == width
    if found:
        assert found.threads == min(512, -(-int(np.prod(shape)) // 256) * 256)
    assert computed.recomputed_mask(draw, lambda: None) is None, "a GPU that draws otherwise"
