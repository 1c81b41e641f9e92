"""A recurrent cell written by hand: an LSTM with layer normalization, unrolled by Python's loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LayerNormLSTM(nn.Module):
    """The cell of Ba, Kiros and Hinton, "Layer Normalization" (2016), over all steps of [batch, steps, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.from_input = nn.Linear(width, 4 * width, bias=False)
        self.from_state = nn.Linear(width, 4 * width, bias=False)
        self.norm_input, self.norm_state = nn.LayerNorm(4 * width), nn.LayerNorm(4 * width)
        self.norm_cell = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            gates = self.norm_input(self.from_input(x[:, step])) + self.norm_state(self.from_state(state))
            enter, forget, new, leave = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(self.norm_cell(cell))
            states.append(state)
        return torch.stack(states, dim=1)
