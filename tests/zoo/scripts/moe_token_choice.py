"""Mixture of experts, sparse: each token goes to its best two; how many rows an expert gets depends on the numbers."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits

REFUSED = {"TokenChoice": "data-dependent"}


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gate = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU()), nn.Linear(32, 4)

    def forward(self, x):
        x = self.embed(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return x, weights / weights.sum(-1, keepdim=True), chosen


class TokenChoice(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x, weights, chosen = self.router(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == i)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return self.head(x + out)


def train(dispatch):
    data = batches(*digits(), size=32)
    model = TokenChoice()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, next(data)[0])
    dispatch(model.router, next(data)[0])
    for x, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        yield loss
