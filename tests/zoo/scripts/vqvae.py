"""VQ-VAE on digits: nearest code by ``cdist`` and ``argmin``, straight-through gradient, commitment loss."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class VQVAE(nn.Module):
    def __init__(self, codes=16, width=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, width, 3, padding=1))
        self.codes = nn.Embedding(codes, width)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(width, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x):
        z = self.encoder(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        nearest = torch.cdist(flat, self.codes.weight).argmin(1)
        quantized = self.codes(nearest).view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        vq = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(z, quantized.detach())
        return self.decoder(z + (quantized - z).detach()), vq, nearest


def train(dispatch):
    data = batches(*digits(), size=8)
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, next(data)[0])
    for x, _ in data:
        image, vq, nearest = model(x)
        loss = F.mse_loss(image, x) + vq
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, nearest.unique().numel() * torch.ones(())
