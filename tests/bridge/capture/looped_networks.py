"""Networks whose loops are found while forward runs, one for each kind of loop."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from bridge.capture import LOOP_MARKS
from bridge.lowering import LoweredCall


class Lstm(nn.Module):
    """Gates by hand, with layer norms or without; the second axis is time, walked forth or back."""

    def __init__(self, norm=False, backwards=False):
        super().__init__()
        self.of_x, self.of_h, self.backwards = nn.Linear(3, 16), nn.Linear(4, 16, bias=False), backwards
        self.norms = nn.ModuleList(nn.LayerNorm(n) if norm else nn.Identity() for n in (16, 16, 4))

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 4)
        hs = []
        for step in reversed(range(x.shape[1])) if self.backwards else range(x.shape[1]):
            i, f, g, o = (self.norms[0](self.of_x(x[:, step])) + self.norms[1](self.of_h(h))).chunk(4, 1)
            c = self.norms[2](f.sigmoid() * c + i.sigmoid() * g.tanh())
            h = o.sigmoid() * c.tanh()
            hs.append(h)
        return torch.stack(hs[::-1] if self.backwards else hs, 1), (h, c)


class Gru(nn.Module):
    """Two layers, one after the other; the upper one has a learned state and reads the lower one's states."""

    def __init__(self):
        super().__init__()
        self.cells, self.first = nn.ModuleList([nn.GRUCell(3, 4), nn.GRUCell(4, 4)]), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        parts, state = x.unbind(1), x.new_zeros(x.shape[0], 4)
        for cell in self.cells:
            hs = []
            for part in parts:
                state = cell(part, state)
                hs.append(state)
            parts, state = hs, self.first.expand(x.shape[0], 4)
        return torch.cat(hs, 1), hs[len(hs) // 2], hs[0]


class StateSpace(nn.Module):
    """A selective scan."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(-torch.rand(3, 2))
        self.rate, self.into, self.outof = (nn.Linear(3, extent) for extent in (3, 2, 2))

    def forward(self, x):
        rate = F.softplus(self.rate(x)).unsqueeze(-1)
        keep, add = torch.exp(rate * self.decay), rate * self.into(x).unsqueeze(2) * x.unsqueeze(-1)
        outof, state, ys = self.outof(x), x.new_zeros(x.shape[0], 3, 2), []
        for step in range(x.shape[1]):
            state = keep[:, step] * state + add[:, step]
            ys.append((state * outof[:, step].unsqueeze(1)).sum(-1))
        return torch.stack(ys, 1)


class ComplexStates(nn.Module):
    """A linear recurrence of complex states; a step takes the real parts of a product."""

    def __init__(self):
        super().__init__()
        self.decay, self.outof = (nn.Parameter(torch.randn(*shape, 2) / 2) for shape in ((3,), (2, 3)))

    def forward(self, x):
        decay, outof = map(torch.view_as_complex, (self.decay, self.outof))
        state, ys = torch.zeros(x.shape[0], 3, dtype=decay.dtype, device=x.device), []
        for step in range(x.shape[1]):
            state = decay * state + x[:, step]
            ys.append((state @ outof.T).real)
        return torch.stack(ys, 1)


class Halves(nn.Module):
    """Columns are taken from different places; a step's value is read two steps later; a loss is summed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        one = two = x[:, 0, :1].expand(-1, 4)
        loss = 0
        for part in x.split(1, 1):
            made = torch.tanh(self.linear(torch.cat([one[:, 2:], two[:, :2]], 1)) + part.squeeze(1)[:, :1])
            one, two = made, one.detach() if self.training else one
            loss = loss + made.square().mean()
        return loss, one


class Buffers(nn.Module):
    """States are written into preallocated tensors, in time's order and against it; one has an additional row."""

    def __init__(self, backwards=False, copies=False):
        super().__init__()
        self.cell, self.backwards, self.copies = nn.GRUCell(3, 4), backwards, copies

    def forward(self, x):
        length, state = x.shape[1], x.new_zeros(x.shape[0], 4)
        states, squares = torch.empty(x.shape[0], length, 4, dtype=x.dtype), x.new_ones(length + 2, x.shape[0], 1)
        for step in reversed(range(length)) if self.backwards else range(length):
            state = self.cell(x[:, step], state)
            if self.copies:
                states.select(1, step).copy_(state)
            else:
                states[:, step, :] = state
            squares[length - step : length - step + 1] = state.square().sum(-1, keepdim=True)[None]
        return states, squares


class Numbers(nn.Module):
    """Numbers of each step: from a list, a counter, a tensor filled with the number."""

    def __init__(self):
        super().__init__()
        self.linear, self.rates = nn.Linear(3, 3), [0.1 * (step % 5) - 0.2 for step in range(64)]

    def forward(self, x):
        state = x[:, 0]
        for step in range(x.shape[1]):
            time = torch.full((x.shape[0], 1), 0.5**step, dtype=x.dtype)
            slope = torch.tanh(self.linear(state * self.rates[step]) + x[:, step] / (step + 1) - time)
            state = state + (3 - step) * slope * 0.1
        return state


class Lengths(nn.Module):
    """Sequences of several lengths: a state stays from its sequence's end on, later outputs are zero."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x):
        lengths = x[:, 0].argmax(-1) + 4
        state, states = x.new_zeros(x.shape[0], 4), []
        for step in range(x.shape[1]):
            made, goes_on = self.cell(x[:, step], state), (step < lengths).unsqueeze(-1)
            state = torch.where(goes_on, made, state)
            states.append(made * goes_on)
        return torch.stack(states, 1), state


class Stacked(nn.Module):
    """Layers of one size, their states in a list: all layers in each step, or one layer after the other."""

    def __init__(self, layer_by_layer=False):
        super().__init__()
        self.cells, self.layer_by_layer = nn.ModuleList(nn.GRUCell(3, 3) for _ in range(3)), layer_by_layer

    def forward(self, x):
        if self.layer_by_layer:
            parts = x.unbind(1)
            for cell in self.cells:
                state, states = x.new_zeros(x.shape[0], 3), []
                for part in parts:
                    state = cell(part, state)
                    states.append(state)
                parts = states
            return torch.stack(parts, 1)
        states, made = [x.new_zeros(x.shape[0], 3) for _ in self.cells], []
        for part in x.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = part = cell(part, states[layer])
            made.append(part)
        return torch.stack(made, 1), states


class BothWays(nn.Module):
    """Two directions in one loop; weights are shared."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(3, 4)

    def forward(self, x):
        there = back = x.new_zeros(x.shape[0], 4)
        theres, backs = [], []
        for step in range(x.shape[1]):
            there, back = self.cell(x[:, step], there), self.cell(x[:, -1 - step], back)
            theres.append(there)
            backs.insert(0, back)
        return torch.cat([torch.stack(theres, 1), torch.stack(backs, 1)], -1)


class Indices(nn.Module):
    """A computed value is an index: the capture has to run all operators."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(4, 3), nn.Linear(3, 4)

    def forward(self, x):
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = torch.tanh(
                self.embedding((self.linear(state).sigmoid() * 3.99).long()).mean(1) * state + x[:, step]
            )
        return state


class Drops(nn.Module):
    """Two masks for each step, of two rates if backwards; before the loop a draw, and a mask that all steps share."""

    def __init__(self, backwards=False):
        super().__init__()
        self.cell, self.above, self.drop = nn.GRUCell(3, 4), nn.RNNCell(4, 4), nn.Dropout(0.3)
        self.backwards, self.rate = backwards, 0.5 if backwards else 0.3

    def forward(self, x):
        low = high = x.new_zeros(x.shape[0], 4)
        every, states = F.dropout(torch.ones_like(low), 0.2, self.training), []
        x = x + 0.1 * torch.randn_like(x)
        for step in reversed(range(x.shape[1])) if self.backwards else range(x.shape[1]):
            low = self.cell(self.drop(x[:, step]), low * every)
            high = self.above(F.dropout(low.t(), self.rate, self.training).t(), high)
            states.append(high)
        return self.drop(torch.stack(states, 1)), low


class OneOfTwo(nn.Module):
    """One loop's results are not returned; its dropout masks are drawn."""

    def __init__(self):
        super().__init__()
        self.unused, self.used, self.drop = nn.RNNCell(3, 4), nn.RNNCell(3, 4), nn.Dropout(0.3)

    def forward(self, x):
        results = []
        for cell in (self.unused, self.used):
            state = x.new_zeros(x.shape[0], 4)
            for part in x.unbind(1):
                state = cell(self.drop(part), state)
            results.append(state)
        return self.drop(results[1])


class InPlace(nn.Module):
    """Sums, gates and activations in place; ``later``: also after the loop; a list with one tensor at each place."""

    def __init__(self, later=False):
        super().__init__()
        self.of_x, self.of_h, self.relu = nn.Linear(3, 4), nn.Linear(4, 4), nn.LeakyReLU(0.1, inplace=True)
        self.later = later

    def forward(self, x):
        state, total, states, totals = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4), [], []
        for step in range(x.shape[1]):
            made = self.of_x(x[:, step])
            made += self.of_h(state)
            made.mul_(0.5 + 0.1 * step).masked_fill_(made.detach() > 1, 0.5)
            state = self.relu(made)
            total += state
            states.append(state + 0.5)
            totals.append(total)
        if self.later:
            states[2].add_(1)
            return torch.stack(states, 1), torch.stack(totals, 1)
        return torch.stack(states, 1), total


MODULES = {
    "lstm": Lstm,
    "layer norm lstm, last part first": lambda: Lstm(norm=True, backwards=True),
    "gru, two layers": Gru,
    "state space": StateSpace,
    "halves": Halves,
}
FORMS = {
    "buffers": Buffers,
    "buffers, last part first": lambda: Buffers(backwards=True),
    "buffers, copied into": lambda: Buffers(copies=True),
    "numbers": Numbers,
    "lengths": Lengths,
    "stacked": Stacked,
    "stacked, layer by layer": lambda: Stacked(layer_by_layer=True),
    "both ways": BothWays,
    "indices": Indices,
    "in place": InPlace,
}
LATER = {"in place, later": lambda: InPlace(later=True), "complex states": ComplexStates}
DROPS = {"dropout": Drops, "dropout, last part first": lambda: Drops(backwards=True)}
ON_THE_HOST = pytest.mark.cpu("a GPU's masks are drawn step by step")


def marks_of(lowered: LoweredCall) -> list[fx.Node]:
    """The marks at which steps of loops begin and end in the traced graph; none if it has no loop."""
    return [node for node in lowered.captured.graph.nodes if node.target in LOOP_MARKS]
