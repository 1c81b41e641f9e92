"""SimCLR: two noisy views of each digit, a convolutional encoder with a projection head, the NT-Xent loss."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return F.normalize(self.head(self.body(x)), dim=-1)


class NTXent(nn.Module):
    def forward(self, one, other):
        both = torch.cat([one, other])
        similar = both @ both.T / 0.5
        similar = similar.masked_fill(torch.eye(len(both), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(similar, torch.arange(len(both)).roll(len(one)))


def augment(x):
    shift = int(torch.randint(-1, 2, ()))
    return x.roll(shift, dims=-1) + 0.1 * torch.randn_like(x)


def train(dispatch):
    data = batches(*digits(), size=16)
    encoder, criterion = Encoder(), NTXent()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    dispatch(encoder, next(data)[0])
    dispatch(criterion, (torch.randn(16, 16, requires_grad=True) * 1, torch.randn(16, 16, requires_grad=True) * 1))
    for x, _ in data:
        loss = criterion(encoder(augment(x)), encoder(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
