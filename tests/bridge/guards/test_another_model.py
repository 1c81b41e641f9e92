"""Other models of a library: what they register in its files misses no call of an earlier model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import ModelOutput

from bridge import add_tvm_dispatch, stats


def test_a_later_model_of_transformers_misses_no_call_of_an_earlier_one():
    ids = torch.randint(5, 60, (2, 9))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertForMaskedLM(BertConfig(vocab_size=64, **sizes))
    add_tvm_dispatch(bert, {"input_ids": ids, "labels": ids})
    bert(input_ids=ids, labels=ids).loss.backward()

    class Gpt(GPT2LMHeadModel):  # a class that the library has not seen
        pass

    @dataclass
    class Output(ModelOutput):
        loss: torch.Tensor | None = None

    Output(loss=ids)
    gpt = Gpt(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
    gpt(input_ids=ids, labels=ids).loss.backward()
    bert(input_ids=ids, labels=ids).loss.backward()
    assert stats(bert).hits == 2, dict(stats(bert).misses)
