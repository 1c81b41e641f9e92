"""Mixture of experts, dense: every expert sees every token, weighted by a softmax; a balance loss beside it."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class DenseMixture(nn.Module):
    def __init__(self, width=32, experts=4):
        super().__init__()
        self.embed, self.gate = nn.Linear(64, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x, labels):
        x = self.embed(x.flatten(1))
        weights = self.gate(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], -1) @ weights.unsqueeze(-1)
        balance = weights.mean(0).square().sum() * weights.shape[-1]
        return F.cross_entropy(self.head(x + mixed.squeeze(-1)), labels) + 0.01 * balance


def train(dispatch):
    data = batches(*digits(), size=32)
    model = DenseMixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, next(data))
    for batch in data:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        yield loss
