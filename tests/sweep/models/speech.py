"""HuggingFace models of speech: CTC, randomly skipped layers, encoder and decoder."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.sweep.models.batches import SPECIAL, Arguments, Case, seq2seq, tokens


def _wav2vec2(**options: Any) -> nn.Module:
    layers = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    convolutions = {"conv_dim": (12, 12, 12), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 3}
    others = {"vocab_size": 12, "apply_spec_augment": False, "ctc_loss_reduction": "mean", **options}
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**layers, **convolutions, **positions, **others))


def _waves() -> Arguments:
    """Two sounds of different lengths, each with a shorter text."""
    mask = torch.ones(2, 640, dtype=torch.long)
    mask[1, 500:] = 0
    labels = torch.randint(1, 12, (2, 6))
    labels[1, 4:] = -100
    return {"input_values": torch.randn(2, 640), "attention_mask": mask, "labels": labels}


def _spectra() -> Arguments:
    return {"input_features": torch.randn(2, 8, 24), "labels": tokens(2, 7)}


def _whisper(**options: Any) -> nn.Module:
    shared = seq2seq(decoder_start_token_id=1, **options)
    shared.pop("max_position_embeddings")
    sizes = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**{**shared, **sizes, **SPECIAL}))


_MASKS = {"apply_spec_augment": True, "mask_time_prob": 0.2, "mask_time_length": 3, "mask_feature_prob": 0.1}
_MASKS |= {"mask_feature_length": 2}

MODELS = {
    "wav2vec2-ctc": Case(lambda: _wav2vec2(layerdrop=0.0), _waves),
    "wav2vec2-ctc-layerdrop": Case(lambda: _wav2vec2(layerdrop=0.3), _waves),
    "wav2vec2-ctc-masks": Case(lambda: _wav2vec2(layerdrop=0.0, **_MASKS), _waves),  # NumPy draws them in forward
    "whisper": Case(_whisper, _spectra),
    "whisper-layerdrop": Case(lambda: _whisper(encoder_layerdrop=0.3, decoder_layerdrop=0.3), _spectra),
}
