"""Uncommon recurrent networks over [batch, steps, width]: residuals, masks, solvers, images, memories."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ZoneoutLSTM(nn.Module):
    """Two residual layers of LSTM cells, whose states a mask keeps as they were ("Zoneout", Krueger et al., 2017)."""

    def __init__(self, width: int):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.register_buffer("kept", (torch.arange(97 * width) * 7919 % 10 < 2).view(97, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = [x.new_zeros(x.shape[0], x.shape[2]) for _ in self.cells]
        inner = [torch.zeros_like(each) for each in hidden]
        zoned = self.kept.repeat(x.shape[1] // 97 + 1, 1)
        results = []
        for step in range(x.shape[1]):
            below = x[:, step]
            for layer, cell in enumerate(self.cells):
                new, new_inner = cell(below, (hidden[layer], inner[layer]))
                hidden[layer] = torch.where(zoned[step], hidden[layer], new)
                inner[layer] = torch.where(zoned[step], inner[layer], new_inner)
                below = below + hidden[layer]
            results.append(below)
        return torch.stack(results, 1)


class AttentiveRNN(nn.Module):
    """A GRU cell that attends to all of its states so far: its steps are of different sizes."""

    def __init__(self, width: int):
        super().__init__()
        self.cell, self.query = nn.GRUCell(2 * width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], x.shape[2])
        past = [state]
        for step in range(x.shape[1]):
            memory = torch.stack(past, 1)
            scores = (memory @ self.query(state).unsqueeze(-1)).squeeze(-1) / x.shape[2] ** 0.5
            read = (scores.softmax(-1).unsqueeze(-1) * memory).sum(1)
            state = self.cell(torch.cat([x[:, step], read], -1), state)
            past.append(state)
        return torch.stack(past[1:], 1)


class NeuralODE(nn.Module):
    """A state that Runge and Kutta's method carries from input to input ("ODE-RNN", Rubanova et al., 2019)."""

    def __init__(self, width: int):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width + 1, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.cell = nn.GRUCell(width, width)

    def slope(self, time: float, state: Tensor) -> Tensor:
        return self.field(torch.cat([state, torch.full_like(state[:, :1], time)], 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, step = x.new_zeros(x.shape[0], x.shape[2]), 0.1
        states = x.new_zeros(x.shape)
        for index in range(x.shape[1]):
            time = step * index
            first = self.slope(time, state)
            second = self.slope(time + step / 2, state + step / 2 * first)
            third = self.slope(time + step / 2, state + step / 2 * second)
            fourth = self.slope(time + step, state + step * third)
            state = state + step / 6 * (first + 2 * second + 2 * third + fourth)
            state = self.cell(x[:, index], state)
            states[:, index] = state
        return states, state


class ConvLSTM(nn.Module):
    """Gates by one convolution over input and state (Shi et al., 2015), with peepholes; images of one row."""

    def __init__(self, width: int, channels: int = 4):
        super().__init__()
        self.gates = nn.Conv2d(1 + channels, 4 * channels, 3, padding=1)
        self.peephole = nn.Parameter(torch.linspace(-0.5, 0.5, channels).view(channels, 1, 1))
        self.read = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(x.shape[0], x.shape[1], 1, 2, -1)
        state = images.new_zeros(x.shape[0], self.peephole.shape[0], *images.shape[-2:])
        cell, results = state, []
        for image in images.unbind(1):
            enter, forget, new, leave = self.gates(torch.cat([image, state], 1)).chunk(4, 1)
            cell = torch.sigmoid(forget + self.peephole * cell) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave + self.peephole * cell) * torch.tanh(cell)
            results.append(self.read(state).flatten(1))
        return torch.stack(results, 1)


class MambaBlock(nn.Module):
    """Mamba's block (Gu and Dao, 2023, 3.4): a causal convolution, a selective scan of expanded states, a gate."""

    def __init__(self, width: int, states: int = 4, expand: int = 2, taps: int = 3):
        super().__init__()
        inner = expand * width
        self.enter, self.leave = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.mix = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1)
        self.select, self.rate = nn.Linear(inner, 1 + 2 * states, bias=False), nn.Linear(1, inner)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.enter(x).chunk(2, -1)
        value = F.silu(self.mix(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        rate, entering, leaving = self.select(value).split([1, *[self.log_decay.shape[1]] * 2], -1)
        rate = F.softplus(self.rate(rate))
        decay = torch.exp(rate.unsqueeze(-1) * -torch.exp(self.log_decay))
        added = rate.unsqueeze(-1) * entering.unsqueeze(2) * value.unsqueeze(-1)
        state = x.new_zeros(decay[:, 0].shape)
        results = []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + added[:, step]
            results.append(torch.einsum("bdn,bn->bd", state, leaving[:, step]))
        return self.leave((torch.stack(results, 1) + self.skip * value) * F.silu(gate))


class BeamDecoder(nn.Module):
    """The best few ways through time: each step scores, chooses and gathers the states that go on."""

    def __init__(self, width: int, beams: int = 3):
        super().__init__()
        self.beams, self.cell, self.score = beams, nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, _, width = x.shape
        offsets = torch.arange(self.beams, dtype=x.dtype, device=x.device).view(1, -1, 1)
        state, total = x[:, :1] + offsets, x.new_zeros(batch, self.beams)
        for step in x.unbind(1):
            state = torch.tanh(self.cell(torch.cat([state, step.unsqueeze(1).expand_as(state)], -1)))
            total, best = (total.unsqueeze(-1) + F.log_softmax(self.score(state), -1)).flatten(1).topk(self.beams, -1)
            state = state.gather(1, (best // width).unsqueeze(-1).expand(-1, -1, width))
        return state, total, best


class HaltingRNN(nn.Module):
    """Rows that end by themselves; states of four element types are carried on, some written in place."""

    def __init__(self, width: int):
        super().__init__()
        self.cell = nn.RNNCell(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state, ended = torch.zeros_like(x[:, 0]), torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        steps, total = ended.int(), ended.float()
        for part in x.unbind(1):
            state = torch.where(ended.unsqueeze(1), state, self.cell(part, state))
            steps = steps + (~ended).int()
            total += state.detach().sum(1).float()
            ended = ended | (state.sum(1) > 1.5)
        return state, ended, steps, total


class DeltaMemory(nn.Module):
    """A matrix updated by the delta rule ("fast weights", Schlag et al., 2021)."""

    def __init__(self, width: int):
        super().__init__()
        self.parts = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory, results = x.new_zeros(x.shape[0], x.shape[2], x.shape[2]), []
        for step in range(x.shape[1]):
            key, value, query = self.parts(x[:, step]).chunk(3, 1)
            key = F.normalize(key, dim=1)
            error = value - torch.einsum("bij,bj->bi", memory, key)
            memory = memory + torch.einsum("bi,bj->bij", error, key)
            results.append(torch.einsum("bij,bj->bi", memory, query.softmax(1)))
        return torch.stack(results, 1), memory
