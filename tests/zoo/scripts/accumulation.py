"""Gradient accumulation over micro batches of a DataLoader, clipping, warm-up, an averaged copy of the weights."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits

MICRO = 4


def train(dispatch):
    loader = DataLoader(TensorDataset(*digits(60)), batch_size=8, shuffle=True)  # the last batch has 4 rows
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 10))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    dispatch(model, digits(8)[0], on_miss="compile")
    total, count = 0.0, 0
    while True:
        for x, labels in loader:
            loss = F.cross_entropy(model(x), labels) / MICRO
            loss.backward()
            total, count = total + loss.detach(), count + 1
            if count % MICRO == 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                averaged.update_parameters(model)
                yield total, norm
                total = 0.0
