"""Shared batches and options of the zoo's models: tiny widths, random tokens, labels at tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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

Arguments = dict[str, Any]


def loss_of(result: Any) -> Tensor:
    """The trained value: the model's own loss; without one, the mean square of its first result."""
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = (result if isinstance(result, Tensor) else result[0]).square().mean()
    return loss


class Case(NamedTuple):
    """A model, its training batch, the trained part of its result; ``dtype``: float64, unless eager lacks it."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Arguments]
    loss: Callable[[Any], Tensor] = loss_of
    dtype: torch.dtype = torch.float64


def tokens(batch: int = 3, length: int = 11) -> Tensor:
    """Random word tokens, none of them special."""
    return torch.randint(4, VOCABULARY, (batch, length))


def attention_mask(batch: int = 3, length: int = 11) -> Tensor:
    """Ones, and zeros at the end of the later rows."""
    lengths = torch.tensor([max(2, length - 2 * row) for row in range(batch)])
    return (torch.arange(length) < lengths[:, None]).long()


def language() -> Arguments:
    """Padded token sequences, labels at tokens."""
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


def vision(**options: Any) -> dict[str, Any]:
    """The options of pictures in patches."""
    return {"image_size": 32, "patch_size": 8, "num_labels": 3, "num_channels": 3, **options}


def decoder(**options: Any) -> dict[str, Any]:
    """The options shared by the decoders after LLaMA; two query heads per key-value head."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {**WIDTH, **SPECIAL, **heads, "attention_dropout": 0.1, "use_cache": False, **options}


def seq2seq(**options: Any) -> dict[str, Any]:
    """The options shared by the encoder-decoders after BART."""
    shared = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 40}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    return {"vocab_size": VOCABULARY, **shared, **heads, **rates, **SPECIAL, "use_cache": False, **options}
