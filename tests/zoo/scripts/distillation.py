"""Distillation: a student learns a frozen teacher's softened outputs beside the labels."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.data import batches, digits


def mlp(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))


def train(dispatch):
    data = batches(*digits(), size=16)
    teacher, student = mlp(64).eval().requires_grad_(False), mlp(16)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    dispatch(teacher, next(data)[0], on_miss="compile")
    dispatch(student, next(data)[0])
    for x, labels in data:
        with torch.inference_mode():
            soft = teacher(x).div(2).softmax(-1)
        logits = student(x)
        loss = 4 * F.kl_div(F.log_softmax(logits / 2, -1), soft.clone(), reduction="batchmean")
        loss = loss + F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
