"""Normalizing flow (RealNVP): affine couplings, log determinants, a standard Normal as the base."""

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip, self.net = flip, nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        fixed, moved = x.flip(-1).chunk(2, -1) if self.flip else x.chunk(2, -1)
        scale, shift = self.net(fixed).chunk(2, -1)
        scale = torch.tanh(scale)
        return torch.cat([fixed, moved * scale.exp() + shift], -1), scale.sum(-1)


class RealNVP(nn.Module):
    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(i % 2 == 1) for i in range(4))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("std", torch.ones(2))

    def forward(self, x):
        total = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, log_determinant = coupling(x)
            total = total + log_determinant
        base = torch.distributions.Normal(self.mean, self.std)
        return base.log_prob(x).sum(-1) + total


def train(dispatch):
    model = RealNVP()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, torch.randn(64, 2))
    while True:
        angle = torch.rand(64) * 3.1416
        moon = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(64, 2)
        loss = -model(moon).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
