"""BYOL: an online network and its predictor chase a target that is their exponential moving average."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class Encoder(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))


def train(dispatch):
    data = batches(*digits(), size=16)
    online, predictor = Encoder(), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)
    dispatch(online, next(data)[0])
    dispatch(predictor, torch.randn(16, 16, requires_grad=True) * 1)
    dispatch(target, next(data)[0], on_miss="compile")
    for x, _ in data:
        one, other = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            wanted_other, wanted_one = target(one), target(other)
        loss = 2 - F.cosine_similarity(predictor(online(one)), wanted_one, dim=-1).mean()
        loss = loss - F.cosine_similarity(predictor(online(other)), wanted_other, dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        yield loss
