"""The modules of the memory table, at the sizes people train them in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import ViTConfig
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer
from transformers.models.vit.modeling_vit import ViTLayer

from benchmarks.train_blocks import LlamaBlock, bert_layer, gelu_mlp, gpt2_block

__all__ = ["BLOCKS", "TRANSFORMERS", "LayerNormLSTM", "make"]


class LayerNormLSTM(nn.Module):
    """The cell of Ba, Kiros and Hinton, "Layer Normalization" (2016), over all steps of [batch, steps, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.from_input = nn.Linear(width, 4 * width, bias=False)
        self.from_state = nn.Linear(width, 4 * width, bias=False)
        self.norm_input, self.norm_state = nn.LayerNorm(4 * width), nn.LayerNorm(4 * width)
        self.norm_cell = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            gates = self.norm_input(self.from_input(x[:, step])) + self.norm_state(self.from_state(state))
            enter, forget, new, leave = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(self.norm_cell(cell))
            states.append(state)
        return torch.stack(states, dim=1)


def vit_layer(attention: str) -> nn.Module:
    """A layer of ViT-Base; its published configuration has no dropout."""
    config = ViTConfig()
    config._attn_implementation = attention
    return ViTLayer(config)


#: Name of the row: what makes the module, and the shape of its float32 input.
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

#: The rows that the goal of 0.6 of eager's bytes is for.
TRANSFORMERS = ("BertLayer", "GPT-2 block", "LLaMA block", "ViT layer", "ViT layer, fused attention")


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A row's module in train mode and its input, under the seed."""
    build, shape = BLOCKS[name]
    torch.manual_seed(0)
    return build().train(), torch.randn(shape, requires_grad=True)
