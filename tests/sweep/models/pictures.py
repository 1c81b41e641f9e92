"""HuggingFace models that classify pictures."""

from __future__ import annotations

import transformers as hf

from tests.sweep.models.batches import DROPOUT, Case, images, vision

MODELS = {
    "vit": Case(
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, **DROPOUT, **vision()
            )
        ),
        images,
    ),
    "beit": Case(
        lambda: hf.BeitForImageClassification(
            hf.BeitConfig(
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=40,
                drop_path_rate=0.2,
                out_indices=[1],
                **DROPOUT,
                **vision(),
            )
        ),
        images,
    ),
    "resnet": Case(
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=3, num_channels=3
            )
        ),
        images,
    ),
    "regnet": Case(
        lambda: hf.RegNetForImageClassification(
            hf.RegNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], groups_width=4, num_labels=3)
        ),
        images,
    ),
    "mobilenet-v2": Case(
        lambda: hf.MobileNetV2ForImageClassification(
            hf.MobileNetV2Config(image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.1, num_labels=3)
        ),
        images,
    ),
    "convnext": Case(
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 2], num_stages=2, drop_path_rate=0.2, num_labels=3)
        ),
        images,
    ),
    "swin": Case(
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
    "segformer": Case(
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
}
