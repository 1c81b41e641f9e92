"""Segmentation of a digit's ink: a small U-Net with bilinear upsampling, dice and cross entropy."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


def double(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = double(1, 8), double(8, 12), double(20, 8)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        fine = self.down(x)
        return self.out(self.up(torch.cat([fine, self.grow(self.deep(self.pool(fine)))], dim=1)))


class Dice(nn.Module):
    def forward(self, logits, target, smooth=1.0):
        probability = torch.sigmoid(logits).flatten(1)
        target = target.flatten(1)
        overlap = 2 * (probability * target).sum(1) + smooth
        return 1 - (overlap / (probability.sum(1) + target.sum(1) + smooth)).mean()


def train(dispatch):
    data = batches(*digits(), size=8)
    model, dice = UNet(), Dice()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, next(data)[0])
    dispatch(dice, (torch.randn(8, 1, 8, 8, requires_grad=True) * 1, torch.ones(8, 1, 8, 8)))
    for x, _ in data:
        ink = (x > 0.5).to(x.dtype)
        logits = model(x + 0.2 * torch.randn_like(x))
        loss = dice(logits, ink) + F.binary_cross_entropy_with_logits(logits, ink)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
