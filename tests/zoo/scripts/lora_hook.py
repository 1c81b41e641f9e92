"""LoRA by forward hooks: a low-rank product added to the results of a frozen model's linear layers."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


def train(dispatch):
    data = batches(*digits(), size=16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)).requires_grad_(False)
    for layer in [m for m in model if isinstance(m, nn.Linear)]:
        layer.register_parameter("down", nn.Parameter(torch.randn(2, layer.in_features) * 0.1))
        layer.register_parameter("up", nn.Parameter(torch.zeros(layer.out_features, 2)))
        layer.register_forward_hook(lambda m, args, result: result + args[0] @ m.down.T @ m.up.T)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    dispatch(model, next(data)[0])
    for x, labels in data:
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
