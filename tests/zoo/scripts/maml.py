"""MAML: an inner step of gradient descent inside forward, the outer gradient through it (double backward)."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class MAML(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, y, query, wanted):
        weights = dict(self.net.named_parameters())
        loss = F.mse_loss(functional_call(self.net, weights, (x,)), y)
        gradients = torch.autograd.grad(loss, weights.values(), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return F.mse_loss(functional_call(self.net, fast, (query,)), wanted)


def task():
    amplitude, phase = torch.rand(2)
    x = torch.rand(20, 1) * 10 - 5
    return [part for half in x.split(10) for part in (half, amplitude * torch.sin(half + phase))]


def train(dispatch):
    model = MAML()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dispatch(model, tuple(task()))
    while True:
        optimizer.zero_grad()
        loss = torch.stack([model(*task()) for _ in range(2)]).mean()
        loss.backward()
        optimizer.step()
        yield loss
