"""Piecewise CUDA graphs of attention with dropout: outputs, gradients, buffers, generator as by single launches."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridge import stats
from bridge.compile import CallLibrary
from bridge.library.attention import KERNELS, AttentionKernel
from tests.bridge.dispatch.recorded_loops import LOOPS, Pair, plain
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU

EACH = [
    pytest.param(torch.float32, SDPBackend.EFFICIENT_ATTENTION, id="efficient"),
    pytest.param(torch.bfloat16, SDPBackend.FLASH_ATTENTION, id="flash"),
    pytest.param(torch.bfloat16, SDPBackend.CUDNN_ATTENTION, id="cudnn"),
]


class Attention(nn.Module):
    """Products around two attentions that drop, one of which reads an argument, and a dropout of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(24, 72), nn.Linear(24, 24)
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x):
        rate = 0.2 if self.training else 0.0
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(0, 1)[None] for part in self.inner(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        own = x.unflatten(-1, (3, 8)).transpose(0, 1)[None]
        y = y + F.scaled_dot_product_attention(own, own, y, dropout_p=rate)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + F.dropout(self.outer(y[0].transpose(0, 1).flatten(1)), rate)


def pair_of(dtype, **given):
    return Pair(make=Attention, rows=16, dtype=dtype, single=True, **given)


@pytest.mark.parametrize(("dtype", "kernel"), EACH)
def test_replays_give_the_bits_of_single_launches(dtype, kernel):
    with sdpa_kernel(kernel):
        pair = pair_of(dtype)
        steps = stats(pair.ours).entries[0].forward.steps
        assert [step.name for step in steps if isinstance(step, CallLibrary)].count("dropping_attention") == 2
        backward = stats(pair.ours).entries[0].backward.steps
        assert "dropping_attention_backward" in [step.name for step in backward]
        for seed in range(5 * len(LOOPS)):
            pair.step(seed, LOOPS[seed % len(LOOPS)])
    assert not pair.graphs.refused and pair.graphs.replays > 40, pair.graphs
    assert not stats(pair.ours).misses


def test_sizes_that_vary():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        pair = pair_of(torch.float32, dynamic=True)
        for seed in range(40):
            pair.step(seed, lambda *given, rows=(8, 16, 24)[seed % 3]: plain(*given, rows=rows))
    assert not pair.graphs.refused and pair.graphs.replays > 20, pair.graphs


def test_threads_on_one_stream_do_not_come_between_the_graphs_of_a_replay():
    """Both programs have their intermediates in the same memory; one of them draws."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        drawing, other = pair_of(torch.float32), pair_of(torch.float32)
        for pair in (drawing, other):
            for seed in range(8):
                pair.step(seed, plain)
        other.ours.eval(), other.eager.eval()
        x, masked, wrong = drawing.batch(1), [], []
        for seed in range(3):
            torch.manual_seed(seed)
            masked.append(drawing.eager(x).detach())
        with torch.no_grad():
            wanted = other.eager(x)

        def draw():
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                for call in range(300):
                    torch.manual_seed(call % 3)
                    if not torch.equal(drawing.ours(x), masked[call % 3]):
                        wrong.append(("drawing", call))

        def replay():
            with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                wrong.extend(call for call in range(900) if not torch.equal(other.ours(x), wanted))

        threads = [threading.Thread(target=each) for each in (draw, replay)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:5]
    assert drawing.graphs.replays > 200 and other.graphs.replays > 200, (drawing.graphs, other.graphs)


def test_a_call_between_graphs_that_fails(monkeypatch):
    """The error is the caller's, and later calls are replays again."""

    def fails(*given):
        raise torch.OutOfMemoryError("no memory")

    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        pair = pair_of(torch.float32)
        for seed in range(8):
            pair.step(seed, plain)
        with monkeypatch.context() as patch:
            patch.setitem(KERNELS, "efficient", AttentionKernel(fails, fails))
            with pytest.raises(torch.OutOfMemoryError):
                pair.ours(pair.batch(1))
        replays = pair.graphs.replays
        for seed in range(3):
            pair.step(seed, plain)
    assert pair.graphs.replays > replays
