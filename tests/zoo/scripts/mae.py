"""Masked autoencoder on digits: patches kept by an argsort of draws, gathered, restored for the decoder."""

import torch
from torch import nn

from tests.zoo.data import batches, digits

WIDTH = 16


def layer():
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.encoder, self.decoder = layer(), layer()
        self.hidden, self.head = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Linear(WIDTH, 4)

    def forward(self, images):
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(images), 16, 4)
        order = torch.rand(len(images), 16).argsort(1)
        restore, kept = order.argsort(1), order[:, :6]
        x = self.embed(patches) + self.positions
        x = self.encoder(x.gather(1, kept.unsqueeze(-1).expand(-1, -1, WIDTH)))
        x = torch.cat([x, self.hidden.expand(len(x), 10, -1)], 1)
        x = x.gather(1, restore.unsqueeze(-1).expand(-1, -1, WIDTH)) + self.positions
        off = (self.head(self.decoder(x)) - patches).square().mean(-1)
        masked = torch.ones(len(images), 16).scatter(1, kept, 0.0)
        return (off * masked).sum() / masked.sum()


def train(dispatch):
    data = batches(*digits(), size=8)
    model = MaskedAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    dispatch(model, next(data)[0])
    for x, _ in data:
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
