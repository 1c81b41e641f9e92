"""GAN: two networks, two optimizers, the generated images detached for the discriminator's step."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand = nn.Linear(16, 16 * 4, bias=False)
        self.body = nn.Sequential(
            nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.out = nn.Sequential(nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid())

    def forward(self, z):
        return self.out(self.body(self.expand(z).view(-1, 16, 2, 2)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1))
        self.head = nn.Sequential(nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 1))

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


def train(dispatch):
    data = batches(*digits(), size=16)
    generator, discriminator = Generator(), Discriminator()
    adam = {"lr": 1e-3, "betas": (0.5, 0.999)}
    first = torch.optim.Adam(generator.parameters(), **adam)
    second = torch.optim.Adam(discriminator.parameters(), **adam)
    dispatch(generator, torch.randn(16, 16))
    dispatch(discriminator, next(data)[0], on_miss="compile")  # images with and without a gradient
    for real, _ in data:
        fake = generator(torch.randn(len(real), 16))

        second.zero_grad()
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        judged = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        judged = judged + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
        judged.backward()
        second.step()

        first.zero_grad()
        on_fake = discriminator(fake)
        fooled = F.binary_cross_entropy_with_logits(on_fake, torch.ones_like(on_fake))
        fooled.backward()
        first.step()
        yield judged, fooled
