"""Small modules as trained on GPUs: name → constructor of the module and of its sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.bert.modeling_bert import BertLayer

_VOCABULARY = 67
_WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = {"vocab_size": _VOCABULARY, "max_position_embeddings": 40}

Make = Callable[[], Any]


def _layer(attention: str, p: float) -> nn.Module:
    rates = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
    return BertLayer(hf.BertConfig(**_WIDTH, **rates, attn_implementation=attention))


def _rows(*shape: int) -> Make:
    return lambda: torch.randn(*shape, requires_grad=True)


def _language() -> dict[str, Any]:
    ids = torch.randint(3, _VOCABULARY, (3, 17))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _pixels(size: int) -> Make:
    return lambda: {"pixel_values": torch.randn(3, 3, size, size), "labels": torch.tensor([1, 0, 2])}


def _bert(attention: str = "eager") -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**_WIDTH, **_TEXT, attn_implementation=attention))


def _gpt2(attention: str = "eager") -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": _VOCABULARY}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, use_cache=False, attn_implementation=attention))


def _encoder() -> nn.Module:
    """torch's own layers, whose attention is fused, with dropout."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _llama() -> nn.Module:
    options = {"num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager"}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_WIDTH, **_TEXT, **options))


def _t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": _VOCABULARY}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**sizes, use_cache=False, decoder_start_token_id=0, attn_implementation="eager")
    )


def _vit() -> nn.Module:
    options = {"image_size": 16, "patch_size": 4, "num_labels": 3, "attn_implementation": "eager"}
    return hf.ViTForImageClassification(hf.ViTConfig(**_WIDTH, **options, hidden_dropout_prob=0.1))


def _swin() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes, window_size=4, num_labels=3, drop_path_rate=0.0))


def _resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 3}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))


def _rms() -> nn.Module:
    """With and without an ``eps`` and a weight; a product behind: the square of a norm has no gradient to compare."""
    norms = nn.RMSNorm(24), nn.RMSNorm(24, eps=1e-3), nn.RMSNorm((7, 24), elementwise_affine=False)
    layers = [layer for norm in norms for layer in (nn.Linear(24, 24), norm)]
    return nn.Sequential(*layers, nn.Linear(24, 24))  # or a mean square would be the same for all parameters


class Mixed(nn.Module):
    """Draws in several ways, between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.first(x), 0.3, self.training)
        h = h + 0.1 * torch.rand_like(h) * torch.randn(h.shape[-1], device=h.device, dtype=h.dtype)
        keep = torch.empty_like(h).bernoulli_(0.8) + torch.randn(())  # of the host's generator
        h = self.second(h * keep)
        return nn.functional.dropout(h, 0.5, self.training).tanh()


LAYERS: dict[str, tuple[Make, Make]] = {
    f"BertLayer {attention} p={p} {size}": (lambda a=attention, p=p: _layer(a, p), _rows(*size, 32))
    for attention in ("eager", "sdpa")
    for p in (0.0, 0.1)
    for size in ((3, 17), (1, 14), (4, 128))
}
"""One transformer layer, by attention, dropout's rate, and batch and length."""

CASES: dict[str, tuple[Make, Make]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), _rows(5, 8)),
    "BertForMaskedLM": (_bert, _language),
    "BertForMaskedLM sdpa": (lambda: _bert("sdpa"), _language),
    "GPT-2": (_gpt2, _language),
    "GPT-2 sdpa": (lambda: _gpt2("sdpa"), _language),
    "TransformerEncoder": (_encoder, _rows(3, 17, 32)),
    "LLaMA": (_llama, _language),
    "T5": (_t5, _language),
    "ViT": (_vit, _pixels(16)),
    "Swin": (_swin, _pixels(32)),
    "ResNet": (_resnet, _pixels(32)),
    "RMSNorm": (_rms, _rows(3, 7, 24)),
    "nn.LSTM": (lambda: nn.LSTM(16, 16, batch_first=True), _rows(3, 9, 16)),
    "LSTMCell": (lambda: nn.LSTMCell(16, 16), _rows(3, 16)),
    "GRUCell": (lambda: nn.GRUCell(16, 16), _rows(3, 16)),
    "rand, randn, bernoulli, dropout": (Mixed, _rows(7, 24)),
}
