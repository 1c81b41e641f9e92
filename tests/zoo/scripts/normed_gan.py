"""Hinge GAN on vectors: a discriminator with the hooks ``spectral_norm`` and ``weight_norm`` of ``torch.nn.utils``."""

import torch
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm


def train(dispatch):
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(
        spectral_norm(nn.Linear(2, 16)), nn.LeakyReLU(0.2), weight_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 1)
    )
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    second = torch.optim.Adam(discriminator.parameters(), lr=4e-3, betas=(0.0, 0.9))
    dispatch(generator, torch.randn(32, 4), on_miss="compile")
    dispatch(discriminator, torch.randn(32, 2), on_miss="compile")
    while True:
        angle = torch.rand(32) * 6.2832
        real = torch.stack([angle.cos(), angle.sin()], 1)
        with torch.no_grad():
            fake = generator(torch.randn(32, 4))
        judged = (1 - discriminator(real)).relu().mean() + (1 + discriminator(fake)).relu().mean()
        second.zero_grad()
        judged.backward()
        second.step()

        fooled = -discriminator(generator(torch.randn(32, 4))).mean()
        first.zero_grad()
        fooled.backward()
        first.step()
        yield judged, fooled
