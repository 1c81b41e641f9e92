"""HuggingFace models of tiny configurations, as people train them: dropout on, labels, loss.

Caches for generation are off (``use_cache=False``): a training step has no use for them, and they are no tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.bridge.compare import Call
from tests.sweep.check import Outcome, check, combine

__all__ = ["MODELS", "names", "run_case"]

RTOL = 1e-9
VOCABULARY = 53
WIDTH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

Arguments = dict[str, Tensor]


def tokens(batch: int = 3, length: int = 11) -> Tensor:
    """Random word tokens, none of them special."""
    return torch.randint(4, VOCABULARY, (batch, length))


def attention_mask(batch: int = 3, length: int = 11) -> Tensor:
    """Ones, and zeros at the end of the later rows."""
    lengths = torch.tensor([max(2, length - 2 * row) for row in range(batch)])
    return (torch.arange(length) < lengths[:, None]).long()


def language() -> Arguments:
    """Padded token sequences, labels where a token stands."""
    ids, mask = tokens(), attention_mask()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translation() -> Arguments:
    """A padded source and an unpadded target."""
    return {"input_ids": tokens(), "attention_mask": attention_mask(), "labels": tokens(3, 7)}


def images(size: int = 32) -> Arguments:
    """Three small RGB images of three classes."""
    return {"pixel_values": torch.randn(3, 3, size, size), "labels": torch.tensor([1, 0, 2])}


def text_only() -> Arguments:
    """Token sequences that end in the token whose state is pooled; no loss."""
    ids = tokens()
    ids[:, -1] = SPECIAL["eos_token_id"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _vision(**options: Any) -> dict[str, Any]:
    return {"image_size": 32, "patch_size": 8, "num_labels": 3, "num_channels": 3, **options}


def _decoder(**options: Any) -> dict[str, Any]:
    """The options that the decoders after LLaMA share; two query heads per key-value head."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {**WIDTH, **SPECIAL, **heads, "attention_dropout": 0.1, "use_cache": False, **options}


def _seq2seq(**options: Any) -> dict[str, Any]:
    shared = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 40}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    return {"vocab_size": VOCABULARY, **shared, **heads, **rates, **SPECIAL, "use_cache": False, **options}


def _bert(attention: str) -> nn.Module:
    config = hf.BertConfig(**WIDTH, **DROPOUT)
    config._attn_implementation = attention
    return hf.BertForMaskedLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Arguments]]] = {
    "bert": (lambda: _bert("eager"), language),
    "bert-sdpa": (lambda: _bert("sdpa"), language),
    "roberta": (lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**WIDTH, **DROPOUT, **SPECIAL)), language),
    "distilbert": (
        lambda: hf.DistilBertForMaskedLM(
            hf.DistilBertConfig(
                vocab_size=VOCABULARY, dim=24, n_layers=2, n_heads=3, hidden_dim=40, max_position_embeddings=40
            )
        ),
        language,
    ),
    "electra": (
        lambda: hf.ElectraForMaskedLM(hf.ElectraConfig(**WIDTH, **DROPOUT, embedding_size=12)),
        language,
    ),
    "albert": (lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**WIDTH, **DROPOUT, embedding_size=12)), language),
    "deberta-v2": (
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
    "mobilebert": (
        lambda: hf.MobileBertForMaskedLM(
            hf.MobileBertConfig(
                **WIDTH, **DROPOUT, embedding_size=12, intra_bottleneck_size=12, num_feedforward_networks=2
            )
        ),
        language,
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=40, use_cache=False, **SPECIAL
            )
        ),
        language,
    ),
    "gpt-neox": (
        lambda: hf.GPTNeoXForCausalLM(
            hf.GPTNeoXConfig(**WIDTH, **SPECIAL, hidden_dropout=0.1, attention_dropout=0.1, use_cache=False)
        ),
        language,
    ),
    "opt": (
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
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder())), language),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**_decoder(sliding_window=5))), language),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_decoder())), language),
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_decoder(head_dim=6))), language),
    "gemma": (lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_decoder(head_dim=6))), language),
    "phi": (
        lambda: hf.PhiForCausalLM(hf.PhiConfig(**_decoder(resid_pdrop=0.1, embd_pdrop=0.1, hidden_size=32))),
        language,
    ),
    "phi3": (lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_decoder(resid_pdrop=0.1, embd_pdrop=0.1))), language),
    "olmo": (lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**_decoder())), language),
    "bloom": (
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
    "t5": (
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
    "bart": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_seq2seq(decoder_start_token_id=2))),
        translation,
    ),
    "marian": (
        lambda: hf.MarianMTModel(hf.MarianConfig(**_seq2seq(decoder_start_token_id=0))),
        translation,
    ),
    "vit": (
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, **DROPOUT, **_vision()
            )
        ),
        images,
    ),
    "beit": (
        lambda: hf.BeitForImageClassification(
            hf.BeitConfig(
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=40,
                drop_path_rate=0.2,
                out_indices=[1],
                **DROPOUT,
                **_vision(),
            )
        ),
        images,
    ),
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=3, num_channels=3
            )
        ),
        images,
    ),
    "regnet": (
        lambda: hf.RegNetForImageClassification(
            hf.RegNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], groups_width=4, num_labels=3)
        ),
        images,
    ),
    "mobilenet-v2": (
        lambda: hf.MobileNetV2ForImageClassification(
            hf.MobileNetV2Config(image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.1, num_labels=3)
        ),
        images,
    ),
    "convnext": (
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 2], num_stages=2, drop_path_rate=0.2, num_labels=3)
        ),
        images,
    ),
    "swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32,
                patch_size=4,
                embed_dim=12,
                depths=[2, 2],
                num_heads=[2, 3],
                window_size=4,
                drop_path_rate=0.2,
                num_labels=3,
                **DROPOUT,
            )
        ),
        images,
    ),
    "segformer": (
        lambda: hf.SegformerForImageClassification(
            hf.SegformerConfig(
                num_encoder_blocks=2,
                depths=[1, 1],
                sr_ratios=[2, 1],
                hidden_sizes=[8, 16],
                patch_sizes=[7, 3],
                strides=[4, 2],
                num_attention_heads=[1, 2],
                mlp_ratios=[2, 2],
                drop_path_rate=0.2,
                num_labels=3,
                **DROPOUT,
            )
        ),
        images,
    ),
    "clip-text": (
        lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**WIDTH, **SPECIAL, attention_dropout=0.1)),
        text_only,
    ),
    "mamba": (
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(
                vocab_size=VOCABULARY, hidden_size=24, state_size=4, num_hidden_layers=2, use_cache=False, **SPECIAL
            )
        ),
        lambda: {"input_ids": (ids := tokens(3, 7)), "labels": ids},
    ),
}
"""The model and its training batch by name."""


def names() -> list[str]:
    """The cases of this suite."""
    return list(MODELS)


def run_case(name: str, *, limit: int = 1, seed: int = 0, varying: int | None = None) -> Outcome:
    """One training step: loss and every output, every gradient, buffers, generator state. ``limit`` has no effect."""
    del limit
    start = time.perf_counter()
    make_model, make_inputs = MODELS[name]
    torch.manual_seed(seed)
    module = make_model().double().train()
    verdict = check(module, Call(kwargs=make_inputs()), rtol=RTOL, seed=seed, varying=varying)
    return combine(name, [verdict], time.perf_counter() - start)
