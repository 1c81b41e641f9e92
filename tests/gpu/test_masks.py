"""transformers' masks: eager skips one of ones, and another attention kernel drops: losses and draws beside eager's."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE, generators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


def batch(mask):
    ids = torch.arange(64, device=DEVICE).reshape(4, 16)
    found = {"input_ids": ids, "labels": ids}
    if mask is not None:
        found["attention_mask"] = torch.ones_like(ids)
    if mask == "padded":
        found["attention_mask"][1, 9:] = 0
    return found


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masks", [(None,), ("ones", "padded"), ("padded", "ones")], ids=str)
def test_each_mask_is_attended_by_eagers_kernel(masks, half):
    torch.manual_seed(0)
    eager = BertForMaskedLM(BertConfig(vocab_size=64, attn_implementation="sdpa", **SIZES)).to(DEVICE).train()
    module = copy.deepcopy(eager)
    cast = (lambda: nullcontext()) if half is None else (lambda: torch.autocast(DEVICE.type, half))
    batches = [batch(masks[step % len(masks)]) for step in range(4)]
    with cast():
        add_tvm_dispatch(module, (), sample_kwargs=batches[0], on_miss="compile")
    found = []
    for each in (eager, module):
        optimizer = torch.optim.SGD(each.parameters(), 0.01)
        torch.manual_seed(1)
        losses, states = [], []
        for kwargs in batches:
            optimizer.zero_grad()
            with cast():
                loss = each(**kwargs).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().float())
            states.append(generators())
        found.append((torch.stack(losses), torch.stack(states)))
    (wanted, drawn), (losses, ours) = found
    assert torch.equal(drawn, ours)
    tolerance = 1e-5 if half is None else 5e-3
    torch.testing.assert_close(losses, wanted, rtol=tolerance, atol=tolerance)
    assert stats(module).hits == 4 and len(stats(module).entries) == len(masks)
