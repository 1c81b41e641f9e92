"""The modules of the memory table, at their usual training sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import ViTConfig
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer
from transformers.models.vit.modeling_vit import ViTLayer

from benchmarks.train_blocks import LayerNormLSTM, LlamaBlock, bert_layer, gelu_mlp, gpt2_block


def vit_layer(attention: str) -> nn.Module:
    """A layer of ViT-Base; its published configuration has no dropout."""
    config = ViTConfig()
    config._attn_implementation = attention
    return ViTLayer(config)


#: Name of the row → a function that makes the module, and the shape of its float32 input.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BertLayer": (bert_layer, (8, 128, 768)),
    "GPT-2 block": (gpt2_block, (8, 128, 768)),
    "LLaMA block": (LlamaBlock, (8, 128, 768)),
    "ViT layer": (lambda: vit_layer("eager"), (8, 197, 768)),
    "ViT layer, fused attention": (lambda: vit_layer("sdpa"), (8, 197, 768)),
    "LayerNorm-LSTM cell, 8 steps": (lambda: LayerNormLSTM(512), (32, 8, 512)),
    "ResNet block": (lambda: ResNetBasicLayer(64, 64), (8, 64, 56, 56)),
    "GELU-MLP": (gelu_mlp, (1024, 768)),
}

#: The rows with the goal of 0.6 of eager's bytes.
TRANSFORMERS = ("BertLayer", "GPT-2 block", "LLaMA block", "ViT layer", "ViT layer, fused attention")


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A row's module in train mode and its input, under the seed."""
    build, shape = BLOCKS[name]
    torch.manual_seed(0)
    return build().train(), torch.randn(shape, requires_grad=True)
