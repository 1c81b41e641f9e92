"""LoRA by wrapping: the linear layers of a frozen transformer layer replaced by low-rank adapted ones."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2, alpha=4):
        super().__init__()
        self.base, self.scale, self.dropout = base.requires_grad_(False), alpha / rank, nn.Dropout(0.05)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(self.dropout(x), self.down), self.up) * self.scale


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(64, 10)

    def forward(self, rows):
        mixed = F.scaled_dot_product_attention(self.q(rows), self.k(rows), self.v(rows))
        return self.head(self.norm(rows + self.o(mixed)).flatten(1))


def train(dispatch):
    data = batches(*digits(), size=16)
    model = Classifier().requires_grad_(False)
    for name in ("q", "v"):
        setattr(model, name, LoRALinear(getattr(model, name)))
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    dispatch(model, next(data)[0].squeeze(1))
    for x, labels in data:
        loss = F.cross_entropy(model(x.squeeze(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
