"""Recurrent networks written by hand over [batch, steps, width]: a Python loop over the steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LSTM(nn.Module):
    """The cell of ``nn.LSTM``."""

    def __init__(self, width: int):
        super().__init__()
        self.from_input, self.from_state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            gates = self.from_input(x[:, step]) + self.from_state(state)
            enter, forget, new, leave = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
            states.append(state)
        return torch.stack(states, dim=1)


class GRU(nn.Module):
    """The cell of ``nn.GRU``: the reset gate follows the product."""

    def __init__(self, width: int):
        super().__init__()
        self.from_input, self.from_state = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            reset, keep, new = self.from_input(x[:, step]).chunk(3, dim=-1)
            of_reset, of_keep, of_new = self.from_state(state).chunk(3, dim=-1)
            keep = torch.sigmoid(keep + of_keep)
            new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
            state = (1 - keep) * new + keep * state
            states.append(state)
        return torch.stack(states, dim=1)


class SelectiveScan(nn.Module):
    """The recurrence of Gu and Dao, "Mamba" (2023), section 3: the input decides the decay of the state."""

    def __init__(self, width: int, states: int = 16):
        super().__init__()
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.rate, self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, states), nn.Linear(width, states)
        self.skip = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        decay = -torch.exp(self.log_decay)
        rate, enter, leave = F.softplus(self.rate(x)), self.enter(x), self.leave(x)
        given = rate * x
        state = x.new_zeros(x.shape[0], *decay.shape)
        ys = []
        for step in range(x.shape[1]):
            added = given[:, step].unsqueeze(-1) * enter[:, step].unsqueeze(1)
            state = torch.exp(rate[:, step].unsqueeze(-1) * decay) * state + added
            ys.append((state * leave[:, step].unsqueeze(1)).sum(-1))
        return torch.stack(ys, dim=1) + x * self.skip
