"""Mixture of experts, sparse: each expert takes its best tokens (``topk``) and adds to their rows (``index_add``)."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class ExpertChoice(nn.Module):
    def __init__(self, width=32, experts=4):
        super().__init__()
        self.embed, self.gate = nn.Linear(64, width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.embed(x.flatten(1))
        scores = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight, rows = scores[:, i].topk(2 * len(x) // len(self.experts))
            out = out.index_add(0, rows, expert(x[rows]) * weight[:, None])
        return self.head(x + out)


def train(dispatch):
    data = batches(*digits(), size=32)
    model = ExpertChoice()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, next(data)[0])
    for x, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        yield loss
