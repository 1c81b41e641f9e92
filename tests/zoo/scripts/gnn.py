"""Graph network: mean of messages over the edges by ``index_add``, two layers, half of the nodes labelled."""

import torch
from torch import nn
from torch.nn import functional as F


class Convolution(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.own, self.message = nn.Linear(before, after), nn.Linear(2 * before, after)

    def forward(self, x, edges):
        source, target = edges
        messages = self.message(torch.cat([x[source], x[target]], -1)).relu()
        total = x.new_zeros(x.shape[0], messages.shape[-1]).index_add_(0, target, messages)
        count = x.new_zeros(x.shape[0]).index_add_(0, target, torch.ones_like(target, dtype=x.dtype))
        return self.own(x) + total / count.clamp(min=1).unsqueeze(-1)


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = Convolution(8, 16), Convolution(16, 3), nn.Dropout(0.2)

    def forward(self, x, edges):
        return self.second(self.drop(self.first(x, edges).relu()), edges)


def train(dispatch):
    x, edges, labels = torch.randn(40, 8), torch.randint(0, 40, (2, 160)), torch.randint(0, 3, (40,))
    known = torch.rand(40) < 0.5
    model = GNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    dispatch(model, (x, edges))
    while True:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[known], labels[known])
        loss.backward()
        optimizer.step()
        yield loss
