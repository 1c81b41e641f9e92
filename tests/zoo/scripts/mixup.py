"""Mixup and label smoothing: convex pairs of digits, two smoothed cross entropies, a ResNet-like block."""

import torch
from torch import nn

from tests.zoo.data import batches, digits


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return nn.functional.relu(x + self.body(x))


def train(dispatch):
    data = batches(*digits(), size=16)
    stem = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    model = nn.Sequential(stem, Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    share = torch.distributions.Beta(0.4, 0.4)
    dispatch(model, next(data)[0])
    dispatch(criterion, (torch.randn(16, 10, requires_grad=True) * 1, torch.zeros(16, dtype=torch.long)))
    for x, labels in data:
        weight, order = share.sample(), torch.randperm(len(x))
        logits = model(weight * x + (1 - weight) * x[order])
        loss = weight * criterion(logits, labels) + (1 - weight) * criterion(logits, labels[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
