"""Convolutional classifier on digits: batch norm, pooling, dropout; SGD with momentum, evaluated every few steps."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.drop = nn.Conv2d(8, 16, 3, padding=1), nn.Dropout(0.25)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return F.log_softmax(self.head(self.drop(torch.flatten(x, 1))), dim=1)


def train(dispatch):
    images, labels = digits()
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    dispatch(model, images[:16], on_miss="compile")
    for step, (x, y) in enumerate(batches(images[64:], labels[64:], size=16)):
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                checked = F.nll_loss(model(images[:64]), labels[:64])
            model.train()
        yield loss, checked
