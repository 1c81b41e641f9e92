"""Variational autoencoder on digits: reparameterization, KL weight annealed as a tensor argument."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x, beta):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        fit = F.binary_cross_entropy_with_logits(self.decoder(z), x.flatten(1), reduction="sum") / len(x)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return fit + beta * kl, fit.detach(), kl.detach()


def train(dispatch):
    data = batches(*digits(), size=32)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, (next(data)[0], torch.tensor(0.0)))
    for step, (x, _) in enumerate(data):
        optimizer.zero_grad()
        loss, fit, kl = model(x, torch.tensor(min(step / 10, 1.0)))
        loss.backward()
        optimizer.step()
        yield loss, fit, kl
