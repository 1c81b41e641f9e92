"""Recorded graphs of sizes that vary, on a GPU: eager's numbers, one recording for each size that comes back."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import partial

import pytest
import torch
import transformers as hf
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from bridge.compile.cuda.memory import SlotMemory
from tests.bridge.dispatch.recorded_loops import Pair, plain
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


class Layer(nn.Module):
    """Norms, dropout, activations: operators that every version of torch traces with dynamic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(24), nn.LayerNorm(24)
        self.scale = nn.Parameter(torch.randn(24))

    def forward(self, x):
        h = F.gelu(self.first(x) * self.scale)
        return x + self.second(F.dropout(h, 0.2, self.training)).softmax(-1)


def test_sizes_that_come_back_are_replayed():
    pair, order = Pair(dynamic=True, make=Layer), random.Random(0)
    sizes = [order.randint(3, 24) for _ in range(160)]
    for seed, rows in enumerate(sizes):
        pair.step(seed, partial(plain, rows=rows))
    graphs, made = pair.graphs, pair.graphs.recordings
    often = sum(count > 3 for count in Counter(sizes[60:]).values())
    assert often > 8 and made >= 2 * often and not graphs.refused, graphs
    replays, seen = graphs.replays, []
    for seed, rows in enumerate(sizes[100:]):
        pair.step(seed, partial(plain, rows=rows))
        if rows == sizes[-1]:
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
    assert graphs.replays >= replays + 100 and not stats(pair.ours).misses, graphs
    assert seen[-1] <= 1.01 * seen[1], seen


def test_a_model_of_many_lengths():
    """BERT, each batch with a length of its own: losses and parameters are eager's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = hf.BertConfig(vocab_size=96, attn_implementation="eager", **sizes)
    eager = hf.BertForMaskedLM(config).to(DEVICE, torch.float64).train()
    module, order = copy.deepcopy(eager), random.Random(0)

    def batch(length):
        ids = torch.randint(0, 96, (4, length), device=DEVICE)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    shapes = {name: {1: Dim("length", min=3, max=512)} for name in ("input_ids", "attention_mask", "labels")}
    add_tvm_dispatch(module, sample_kwargs=batch(17), dynamic_shapes=shapes, cuda_graphs=True)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3, fused=True) for each in (module, eager)]
    losses = []
    for step in range(120):
        given, made = batch(order.randint(3, 24)), []
        for each, optimizer in zip((module, eager), optimizers, strict=True):
            torch.manual_seed(step)
            loss = each(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            made.append(loss.detach())
        losses.append(torch.stack(made))
    ours, theirs = torch.stack(losses).unbind(1)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    graphs = stats(module).graphs
    assert graphs.replays > 100 and not graphs.refused and not stats(module).misses, stats(module)


def test_memory_begins_at_one_address_for_all_sizes():
    memory = SlotMemory(torch.cuda.current_device())
    forms = [[((rows, 24), (24, 1), torch.float32), ((rows,), (1,), torch.int64)] for rows in (9, 9000, 5, 8000, 9)]
    first, other = memory(forms[1])
    addresses = first.data_ptr(), other.data_ptr()
    del first, other
    for each in forms:
        made = memory(each)
        assert tuple(one.data_ptr() for one in made) == addresses and made[1].data_ptr() % 16 == 0
        assert [(tuple(one.shape), one.stride(), one.dtype) for one in made] == each
        made[0].fill_(1), made[1].fill_(2)
        assert bool((made[0] == 1).all()) and bool((made[1] == 2).all())
        second = memory(each)
        assert second[0].data_ptr() != addresses[0]
        del made, second
    grown = memory.grown
    (large,) = memory([((1 << 22,), (1,), torch.float32)])
    assert memory.grown == grown + 1 and memory.held_bytes >= large.nbytes


@pytest.mark.parametrize("held", [1, 6])
def test_memory_that_is_held_is_not_given_again(held):
    memory, kept = SlotMemory(torch.cuda.current_device()), []
    for count in range(20):
        (made,) = memory([((64 + count,), (1,), torch.float32)])
        made.fill_(count)
        kept = [*kept, (made, count)][-held:]
        assert all(bool((tensor == value).all()) for tensor, value in kept)
