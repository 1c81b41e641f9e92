"""Recommendation (DLRM): dense features through an MLP, bags of categories, dot products of all pairs."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


def mlp(*widths):
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self, sizes=(50, 30, 20), width=8):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in sizes)
        self.bottom = mlp(6, 16, width)
        pairs = (len(sizes) + 1) * len(sizes) // 2
        self.top = mlp(width + pairs, 16, 1)

    def forward(self, dense, categories, offsets):
        dense = self.bottom(dense)
        found = [bag(c, o) for bag, c, o in zip(self.bags, categories, offsets, strict=True)]
        features = torch.stack([dense, *found], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(features.shape[1], features.shape[1], -1)
        return self.top(torch.cat([dense, products[:, row, column]], 1)).squeeze(1)


def batch():
    dense = torch.randn(16, 6)
    categories = [torch.randint(0, size, (32,)) for size in (50, 30, 20)]
    offsets = [torch.arange(0, 32, 2) for _ in range(3)]
    return (dense, categories, offsets), (dense.sum(1) > 0).to(dense.dtype)


def train(dispatch):
    model = DLRM()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    dispatch(model, batch()[0])
    while True:
        inputs, clicked = batch()
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(*inputs), clicked)
        loss.backward()
        optimizer.step()
        yield loss
