"""CLIP: images and labels' names embedded side by side, a learnt temperature, symmetric cross entropy."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits

NAMES = "zero one two three four five six seven eight nine".split()


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16, bias=False))
        self.letters, self.rnn = nn.Embedding(27, 8, padding_idx=0), nn.GRU(8, 16, batch_first=True)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, names):
        image = F.normalize(self.image(images), dim=-1)
        name = F.normalize(self.rnn(self.letters(names))[1][0], dim=-1)
        logits = self.log_scale.exp().clamp(max=100) * image @ name.t()
        labels = torch.arange(len(images))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def train(dispatch):
    data = batches(*digits(), size=8)
    spelled = torch.tensor([[ord(c) - 96 for c in name] + [0] * (5 - len(name)) for name in NAMES])
    model = CLIP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, labels = next(data)
    dispatch(model, (x, spelled[labels]))
    for x, labels in data:
        loss = model(x, spelled[labels])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
