"""Whole models of random parameters with a batch, at their usual sizes, or at small ones for a smoke test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lstm import LayerNormLSTM


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        make: ``make(quick)``: the module in training mode.
        batch: ``batch(module, length)``: keyword arguments of a call.
        lengths: tokens, or steps, of the first and of another batch; ``None``: not applicable.
    """

    make: Callable[[bool], nn.Module]
    batch: Callable[[nn.Module, int], dict[str, Any]]
    lengths: tuple[int, int] | None = None

    def sample(self, module: nn.Module, quick: bool, which: int = 0) -> dict[str, Any]:
        """The first batch, or the second one, of another length."""
        length = self.lengths[which] if self.lengths else 0
        return self.batch(module, max(length // 16, 2) if quick else length)


def loss_of(result: Any) -> Tensor:
    """A scalar for the backward."""
    if isinstance(result, Tensor):
        return result.sum()
    return result[0].sum() if isinstance(result, tuple) else result.loss


def _bert_layer(quick: bool) -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    return BertLayer(BertConfig(attn_implementation="eager", **(_SMALL_BERT if quick else {}))).train()


def _bert(quick: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**({**_SMALL_BERT, "num_hidden_layers": 2} if quick else {}))).train()


def _gpt2(quick: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 61}
    return GPT2LMHeadModel(GPT2Config(**(small if quick else {}))).train()


def _vit(quick: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000}
    small = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 2}
    return ViTForImageClassification(ViTConfig(**(small | {"image_size": 32} if quick else size))).train()


def _hidden(batch: int) -> Callable[[nn.Module, int], dict[str, Any]]:
    def made(module: nn.Module, length: int) -> dict[str, Any]:
        width = next(module.parameters()).shape[-1]
        return {"hidden_states": torch.randn(batch, length, width, requires_grad=True)}

    return made


def _tokens(batch: int) -> Callable[[nn.Module, int], dict[str, Any]]:
    def made(module: nn.Module, length: int) -> dict[str, Any]:
        ids = torch.randint(0, module.config.vocab_size, (batch, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    return made


def _images(batch: int) -> Callable[[nn.Module, int], dict[str, Any]]:
    def made(module: nn.Module, length: int) -> dict[str, Any]:
        config = module.config
        pixels = torch.randn(batch, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (batch,))}

    return made


def _steps(batch: int) -> Callable[[nn.Module, int], dict[str, Any]]:
    def made(module: nn.Module, length: int) -> dict[str, Any]:
        return {"x": torch.randn(batch, length, module.from_input.in_features, requires_grad=True)}

    return made


_SMALL_BERT = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 61}

MODELS: dict[str, Model] = {
    "BertLayer (1, 128)": Model(_bert_layer, _hidden(1), (128, 96)),
    "BERT-base (1, 128)": Model(_bert, _tokens(1), (128, 96)),
    "BERT-base (4, 128)": Model(_bert, _tokens(4), (128, 96)),
    "GPT-2 small (1, 128)": Model(_gpt2, _tokens(1), (128, 96)),
    "GPT-2 small (4, 128)": Model(_gpt2, _tokens(4), (128, 96)),
    "ViT-S (8, 224 x 224)": Model(_vit, _images(8)),
    "LayerNorm-LSTM (64, 100 steps, 512)": Model(
        lambda quick: LayerNormLSTM(8 if quick else 512).train(), _steps(64), (100, 80)
    ),
    "LayerNorm-LSTM (64, 1000 steps, 512)": Model(
        lambda quick: LayerNormLSTM(8 if quick else 512).train(), _steps(64), (1000, 800)
    ),
}
"""By name, which gives the full sizes."""
