"""Siamese network: anchor, positive and negative through the same layers, the triplet margin loss."""

import torch
from torch import nn

from tests.zoo.data import digits


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))
        self.criterion = nn.TripletMarginLoss(margin=0.5)

    def forward(self, anchor, positive, negative):
        return self.criterion(self.body(anchor), self.body(positive), self.body(negative))


def train(dispatch):
    images, labels = digits()
    by_class = [images[labels == c] for c in range(10)]

    def triplets(size=16):
        a = torch.randint(10, (size,))
        b = (a + torch.randint(1, 10, (size,))) % 10
        pick = lambda classes: torch.stack([by_class[c][torch.randint(len(by_class[c]), ())] for c in classes])  # noqa: E731
        return pick(a), pick(a), pick(b)

    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, triplets())
    while True:
        loss = model(*triplets())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
