"""Tabular regression with uncertainty: embedded categories, BatchNorm1d, ``gaussian_nll_loss``."""

import torch
from torch import nn
from torch.nn import functional as F


class Tabular(nn.Module):
    def __init__(self, sizes=(6, 4, 9)):
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(size, 3) for size in sizes)
        self.norm = nn.BatchNorm1d(5)
        self.body = nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 2))

    def forward(self, numbers, codes, wanted):
        embedded = [table(codes[:, i]) for i, table in enumerate(self.categories)]
        mean, raw = self.body(torch.cat([self.norm(numbers), *embedded], 1)).unbind(1)
        return F.gaussian_nll_loss(mean, wanted, F.softplus(raw) + 1e-3)


def batch():
    numbers, codes = torch.randn(32, 5), torch.stack([torch.randint(0, n, (32,)) for n in (6, 4, 9)], 1)
    return numbers, codes, numbers.sum(1) + codes[:, 0] + 0.1 * torch.randn(32)


def train(dispatch):
    model = Tabular()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    dispatch(model, batch())
    while True:
        loss = model(*batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step(loss.item())
        yield loss
