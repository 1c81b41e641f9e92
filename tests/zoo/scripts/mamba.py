"""Selective state space model: input-dependent step, decay and projections, scanned in a Python loop."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import text

WIDTH, INNER, STATE, LENGTH = 16, 24, 4, 8


class Selective(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inward = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)
        self.select, self.step = nn.Linear(INNER, 1 + 2 * STATE, bias=False), nn.Linear(1, INNER)
        self.log_decay = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(INNER, 1))
        self.direct, self.out = nn.Parameter(torch.ones(INNER)), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        u, gate = self.inward(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.select(u).split([1, STATE, STATE], -1)
        step = F.softplus(self.step(step)).unsqueeze(-1)
        decay, drive = torch.exp(-step * self.log_decay.exp()), step * b.unsqueeze(2) * u.unsqueeze(-1)
        state, states = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            states.append((state * c[:, t, None]).sum(-1))
        y = torch.stack(states, 1) + self.direct * u
        return x + self.out(y * F.silu(gate))


def train(dispatch):
    characters, letters = text()
    model = nn.Sequential(nn.Embedding(letters, WIDTH), Selective(), nn.Linear(WIDTH, letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dispatch(model, characters[:32].view(4, LENGTH))
    while True:
        at = torch.randint(len(characters) - LENGTH, (4, 1)) + torch.arange(LENGTH)
        loss = F.cross_entropy(model(characters[at]).transpose(1, 2), characters[at + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
