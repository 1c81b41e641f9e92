"""HuggingFace models of text in training: dropout on, labels, loss.

Caches for generation are off (``use_cache=False``): a training step does not use them, and they are no tensors.
"""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.sweep.models.batches import (
    DROPOUT,
    SPECIAL,
    VOCABULARY,
    WIDTH,
    Case,
    decoder,
    language,
    seq2seq,
    text_only,
    tokens,
    translation,
)


def _bert(attention: str) -> nn.Module:
    config = hf.BertConfig(**WIDTH, **DROPOUT)
    config._attn_implementation = attention
    return hf.BertForMaskedLM(config)


MODELS = {
    "bert": Case(lambda: _bert("eager"), language),
    "bert-sdpa": Case(lambda: _bert("sdpa"), language),
    "roberta": Case(lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**WIDTH, **DROPOUT, **SPECIAL)), language),
    "distilbert": Case(
        lambda: hf.DistilBertForMaskedLM(
            hf.DistilBertConfig(
                vocab_size=VOCABULARY, dim=24, n_layers=2, n_heads=3, hidden_dim=40, max_position_embeddings=40
            )
        ),
        language,
    ),
    "electra": Case(
        lambda: hf.ElectraForMaskedLM(hf.ElectraConfig(**WIDTH, **DROPOUT, embedding_size=12)),
        language,
    ),
    "albert": Case(lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**WIDTH, **DROPOUT, embedding_size=12)), language),
    "deberta-v2": Case(
        lambda: hf.DebertaV2ForMaskedLM(
            hf.DebertaV2Config(
                **WIDTH,
                **DROPOUT,
                relative_attention=True,
                position_buckets=8,
                norm_rel_ebd="layer_norm",
                share_att_key=True,
                pos_att_type=["p2c", "c2p"],
            )
        ),
        language,
    ),
    "mobilebert": Case(
        lambda: hf.MobileBertForMaskedLM(
            hf.MobileBertConfig(
                **WIDTH, **DROPOUT, embedding_size=12, intra_bottleneck_size=12, num_feedforward_networks=2
            )
        ),
        language,
    ),
    "gpt2": Case(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=40, use_cache=False, **SPECIAL
            )
        ),
        language,
    ),
    "gpt-neox": Case(
        lambda: hf.GPTNeoXForCausalLM(
            hf.GPTNeoXConfig(**WIDTH, **SPECIAL, hidden_dropout=0.1, attention_dropout=0.1, use_cache=False)
        ),
        language,
    ),
    "opt": Case(
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=3,
                ffn_dim=40,
                max_position_embeddings=40,
                word_embed_proj_dim=24,
                dropout=0.1,
                attention_dropout=0.1,
                use_cache=False,
                **SPECIAL,
            )
        ),
        language,
    ),
    "llama": Case(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**decoder())), language),
    "mistral": Case(lambda: hf.MistralForCausalLM(hf.MistralConfig(**decoder(sliding_window=5))), language),
    "qwen2": Case(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**decoder())), language),
    "qwen3": Case(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**decoder(head_dim=6))), language),
    "gemma": Case(lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**decoder(head_dim=6))), language),
    "phi": Case(
        lambda: hf.PhiForCausalLM(hf.PhiConfig(**decoder(resid_pdrop=0.1, embd_pdrop=0.1, hidden_size=32))),
        language,
    ),
    "phi3": Case(lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**decoder(resid_pdrop=0.1, embd_pdrop=0.1))), language),
    "olmo": Case(lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**decoder())), language),
    "bloom": Case(
        lambda: hf.BloomForCausalLM(
            hf.BloomConfig(
                vocab_size=VOCABULARY,
                hidden_size=24,
                n_layer=2,
                n_head=3,
                hidden_dropout=0.1,
                attention_dropout=0.1,
                use_cache=False,
                **SPECIAL,
            )
        ),
        language,
    ),
    "t5": Case(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCABULARY,
                d_model=24,
                d_kv=8,
                d_ff=40,
                num_layers=2,
                num_heads=3,
                dropout_rate=0.1,
                decoder_start_token_id=0,
                use_cache=False,
            )
        ),
        translation,
    ),
    "bart": Case(
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**seq2seq(decoder_start_token_id=2))),
        translation,
    ),
    "marian": Case(
        lambda: hf.MarianMTModel(hf.MarianConfig(**seq2seq(decoder_start_token_id=0))),
        translation,
    ),
    "clip-text": Case(
        lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**WIDTH, **SPECIAL, attention_dropout=0.1)),
        text_only,
    ),
    "mamba": Case(
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(
                vocab_size=VOCABULARY, hidden_size=24, state_size=4, num_hidden_layers=2, use_cache=False, **SPECIAL
            )
        ),
        lambda: {"input_ids": (ids := tokens(3, 7)), "labels": ids},
    ),
}
