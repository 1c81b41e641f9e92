"""Denoising diffusion on digits: a U-Net with timestep embedding, GroupNorm, attention and skip connections."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits

STEPS = 50


def timestep_embedding(t, width):
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2))
    angles = t[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], -1)


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Linear(32, after)
        self.second = nn.Sequential(nn.GroupNorm(4, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time):
        h = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        return self.second(h) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, 1)
        weights = torch.einsum("bct,bcs->bts", q, k).div(math.sqrt(q.shape[1])).softmax(-1)
        return x + self.out(torch.einsum("bts,bcs->bct", weights, v).view_as(x))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.inward, self.down = nn.Conv2d(1, 8, 3, padding=1), Residual(8, 8)
        self.shrink, self.deep, self.attention = nn.Conv2d(8, 16, 3, 2, 1), Residual(16, 16), Attention(16)
        self.grow, self.up = nn.Conv2d(16, 8, 3, padding=1), Residual(16, 8)
        self.out = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x, t):
        time = self.time(timestep_embedding(t, 16))
        fine = self.down(self.inward(x), time)
        coarse = self.attention(self.deep(self.shrink(fine), time))
        grown = self.grow(F.interpolate(coarse, scale_factor=2, mode="nearest"))
        return self.out(self.up(torch.cat([grown, fine], 1), time))


def train(dispatch):
    data = batches(*digits(), size=8)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS), 0)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dispatch(model, (next(data)[0], torch.randint(STEPS, (8,))))
    for x, _ in data:
        t, noise = torch.randint(STEPS, (len(x),)), torch.randn_like(x)
        alpha = kept[t][:, None, None, None]
        loss = F.mse_loss(model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
