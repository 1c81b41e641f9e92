"""Digits read row by row: ``nn.LSTM``, two layers, bidirectional, its last step classified."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(24, 10)

    def forward(self, rows):
        states, (last, _) = self.lstm(rows)
        return self.head(torch.cat([last[-2], last[-1]], -1) + states.mean(1))


def train(dispatch):
    data = batches(*digits(), size=16)
    model = Reader()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    dispatch(model, next(data)[0].squeeze(1))
    for x, labels in data:
        loss = F.cross_entropy(model(x.squeeze(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        yield loss
