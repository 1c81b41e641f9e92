"""Neural ODE: a fixed grid of Runge-Kutta steps of a learnt field, fitted to a spiral."""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))

    def forward(self, t, y):
        return self.net(y**3)


class Solver(nn.Module):
    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self, y, times):
        path = [y]
        for t, dt in zip(times[:-1], times.diff(), strict=True):
            k1 = self.field(t, y)
            k2 = self.field(t + dt / 2, y + dt * k1 / 2)
            k3 = self.field(t + dt / 2, y + dt * k2 / 2)
            k4 = self.field(t + dt, y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(y)
        return torch.stack(path)


def train(dispatch):
    times, spin = torch.linspace(0, 0.5, 5), torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    model = Solver(Field())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    dispatch(model, (torch.randn(16, 2), times))
    while True:
        start = torch.randn(16, 2)
        with torch.no_grad():
            wanted = torch.stack([start @ torch.matrix_exp(spin * t) for t in times])
        loss = (model(start, times) - wanted).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
