"""Loops in forward: for many cells, numbers, gradients and draws are eager's, and the cell is one loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autodiff.ir import bindings, op_name, results
from autodiff.scan import is_scan, scan_of
from bridge import UnsupportedModule, add_tvm_dispatch, explain, lower, stats
from bridge.compile import RunLoop
from partition import MinCut
from tests.bridge.capture.looped_networks import StateSpace
from tests.bridge.compare import check_module
from tests.device import DEVICE
from tests.sampling import sampled


class LayerNormLstm(nn.Module):
    """Layer-normalized gates and cell; time in front."""

    def __init__(self):
        super().__init__()
        self.of_x, self.of_h = nn.Linear(3, 16, bias=False), nn.Linear(4, 16, bias=False)
        self.norm_x, self.norm_h, self.norm_c = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(4)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[1], 4)
        hs = []
        for part in x.unbind(0):
            i, f, g, o = (self.norm_x(self.of_x(part)) + self.norm_h(self.of_h(h))).chunk(4, 1)
            c = self.norm_c(f.sigmoid() * c + i.sigmoid() * g.tanh())
            h = o.sigmoid() * c.tanh()
            hs.append(h)
        return torch.stack(hs), h, c


class Cells(nn.Module):
    """A cell of torch's over the second axis, forth or back."""

    def __init__(self, kind, backwards=False):
        super().__init__()
        self.cell, self.backwards = kind(3, 4), backwards

    def forward(self, x):
        state = c = x.new_zeros(x.shape[0], 4)
        states = []
        for step in reversed(range(x.shape[1])) if self.backwards else range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                state, c = self.cell(x[:, step], (state, c))
            else:
                state = self.cell(x[:, step], state)
            states.append(state)
        return torch.stack(states[::-1] if self.backwards else states, 1)


class BothWays(nn.Module):
    """Two directions, then a layer on both."""

    def __init__(self):
        super().__init__()
        self.there, self.back = Cells(nn.GRUCell), Cells(nn.GRUCell, backwards=True)
        self.above, self.out = nn.RNNCell(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        both, state, loss = torch.cat([self.there(x), self.back(x)], -1), None, 0
        for part in both.unbind(1):
            state = torch.zeros_like(part[:, :4]) if state is None else state
            state = self.above(part, state)
            loss = loss + self.out(state).square().mean()
        return loss


class Dropped(nn.Module):
    """Two layers in one loop, dropout on inputs and between them, a mask for each step."""

    def __init__(self):
        super().__init__()
        self.below, self.above, self.drop = nn.GRUCell(3, 4), nn.LSTMCell(4, 4), nn.Dropout(0.3)

    def forward(self, x):
        h = low = c = x.new_zeros(x.shape[1], 4)
        hs = []
        for step in range(x.shape[0]):
            low = self.below(self.drop(x[step]), low)
            h, c = self.above(self.drop(low), (h, c))
            hs.append(h)
        return torch.stack(hs), c


class Peephole(nn.Module):
    """Channels in the middle have a factor each: its gradient is a sum over the axes around them."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(-0.5, 0.5, 3).view(3, 1))

    def forward(self, x):
        h, hs = x[:, 0], []
        for part in x.unbind(1):
            h = torch.tanh(part + self.factor * h)
            hs.append(h)
        return torch.stack(hs, 1)


class Solver(nn.Module):
    """Steps of a differential equation, in two depths."""

    def __init__(self):
        super().__init__()
        self.slope, self.between = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(5):
            for _ in range(4):
                x = x + 0.1 * torch.tanh(self.slope(x))
            x = self.between(x)
        return x


class TwoBack(nn.Module):
    """A step reads the states of the two steps before it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        one, two = x, 2 * x
        for _ in range(6):
            one, two = torch.tanh(self.linear(one) + two), one
        return one, two


class Truncated(nn.Module):
    """No gradient goes from one step to the one before."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x):
        h, hs = x.new_zeros(x.shape[1], 4), []
        for part in x:
            h = self.cell(part, h.detach())
            hs.append(2 * h)
        return torch.stack(hs), h


class Drawn(nn.Module):
    """A draw in each step, of probabilities that depend on it: the generator's state is carried along."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hs = []
        for _ in range(6):
            x = torch.tanh(self.linear(x))
            x = x * torch.bernoulli(x.sigmoid())
            hs.append(x)
        return torch.stack(hs)


class Decoder(nn.Module):
    """Greedy decoding: a step looks up the embedding of the token that the step before chose."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(9, 4), nn.GRUCell(4, 4), nn.Linear(4, 9)

    def forward(self, start):
        h, token, scores = self.out.weight.new_zeros(len(start), 4), start, []
        for _ in range(6):
            h = self.cell(self.embed(token), h)
            scores.append(self.out(h))
            token = scores[-1].argmax(-1)
        return torch.stack(scores, 1), token


def sequences(*extents):
    return lambda: torch.randn(*extents, requires_grad=True)


MODULES = {
    "layer norm LSTM": (LayerNormLstm, sequences(7, 2, 3), 1),
    "LSTM": (lambda: Cells(nn.LSTMCell), sequences(2, 7, 3), 1),
    "GRU backwards": (lambda: Cells(nn.GRUCell, backwards=True), sequences(2, 7, 3), 1),
    "both ways": (BothWays, sequences(2, 7, 3), 3),
    "dropout": (Dropped, sequences(7, 2, 3), 1),
    "state space": (StateSpace, sequences(2, 7, 3), 1),
    "peephole": (Peephole, sequences(2, 7, 3, 2), 1),
    "solver": (Solver, sequences(2, 4), 1),
    "two back": (TwoBack, sequences(2, 4), 1),
    "truncated": (Truncated, sequences(7, 2, 3), 1),
    "draws": (Drawn, sequences(2, 4), int(DEVICE.type == "cpu")),  # a GPU's states lie on the host, one for each draw
    "decoder": (Decoder, lambda: torch.tensor([1, 5]), 1),
}


def loops(program):
    return [step for step in program.steps if isinstance(step, RunLoop)]


ELSEWHERE = {"layer norm LSTM", "LSTM", "GRU backwards", "both ways", "dropout", "state space"}
"""Of which another test here, or of loops that are found while forward runs, has the path."""


@pytest.mark.parametrize("name", sampled(MODULES, MODULES.keys() - ELSEWHERE))
def test_a_module_computes_what_eager_computes_in_a_loop(name):
    make, inputs, count = MODULES[name]
    entry = stats(check_module(make, inputs)).entries[0]
    assert [len(loops(entry.forward)), len(loops(entry.backward))] == [count, count]


@pytest.mark.parametrize("steps", sampled([1, 2, 64], [1, 64]))
def test_any_number_of_steps(steps):
    entry = stats(check_module(lambda: Cells(nn.RNNCell), sequences(2, steps, 3), calls=1)).entries[0]
    assert [loop.length for loop in (*loops(entry.forward), *loops(entry.backward))] == ([64, 64] if steps > 2 else [])


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_other_element_types(dtype):
    check_module(Dropped, sequences(7, 2, 3), dtype=dtype)


@pytest.mark.parametrize(
    "partition",
    sampled(["save_all", "recompute_all", MinCut(budget=0.3)], lambda case: isinstance(case, MinCut)),
    ids=str,
)
def test_every_strategy(partition):
    check_module(Dropped, sequences(7, 2, 3), partition=partition, calls=1)


@pytest.mark.parametrize("wanted", [0, 1])
def test_gradients_of_some_outputs(wanted):
    check_module(Dropped, sequences(7, 2, 3), process=lambda made: made[wanted])


@pytest.mark.parametrize("make", sampled([LayerNormLstm, Truncated, Dropped], [Truncated]))
def test_without_gradients(make):
    torch.manual_seed(0)
    module, x = make().double(), torch.randn(7, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        lowered = lower(module, x)
        assert lowered.check().ok
    assert sum(is_scan(value) for _, value in bindings(lowered.forward)) == 1


def test_weights_that_need_no_gradient():
    def make():
        module = LayerNormLstm()
        module.of_h.requires_grad_(False)
        module.norm_c.requires_grad_(False)
        return module

    check_module(make, lambda: torch.randn(7, 2, 3))


def test_plans_do_not_depend_on_the_length():
    def programs(steps):
        torch.manual_seed(0)
        return stats(check_module(lambda: Cells(nn.GRUCell), sequences(2, steps, 3), calls=1)).entries[0]

    short, long = programs(8), programs(14)
    for few, many in ((short.forward, long.forward), (short.backward, long.backward)):
        assert len(few.steps) == len(many.steps)
        ((one,), (other,)) = loops(few), loops(many)
        assert one.layout == other.layout and [str(step) for step in one.steps] == [str(step) for step in other.steps]


@pytest.mark.cpu("another device stands in for the GPU")
@pytest.mark.parametrize("sums_later", [False, True])
def test_rows_of_sums_leave_the_loop_for_a_gpu(sums_later, monkeypatch):
    monkeypatch.setattr("bridge.lowering.pipeline.HOST", torch.device("meta") if sums_later else DEVICE)
    torch.manual_seed(0)
    lowered = lower(LayerNormLstm().double(), torch.randn(7, 2, 3, dtype=torch.float64))
    assert lowered.check().ok
    (scan,) = [scan_of(value)[0] for _, value in bindings(lowered.expected_backward) if is_scan(value)]
    assert (scan.carries == 2) is sums_later  # the gradients of state and cell; totals otherwise
    values = dict(bindings(scan.function))
    (product,) = [values[each] for each in results(scan.function) if op_name(values.get(each)) == "relax.matmul"]
    assert product.args[1] in list(scan.function.params)  # the weight itself, which no step transposes


@pytest.mark.cpu("on a GPU in float32 a loop reads a copy")
def test_no_weight_of_a_loop_is_transposed_in_memory():
    """Its steps read the weight in its memory layout, and its gradient is a product."""
    module = add_tvm_dispatch(Cells(nn.RNNCell), torch.randn(3, 6, 3, requires_grad=True))
    (entry,) = stats(module).entries
    reading = [line for line in str(entry.forward).splitlines() if "p_cell_weight_hh" in line]
    assert len(reading) == 1 and "loop of 6 steps" in reading[0], reading
    made = {str(var.name): value for var, value in bindings(entry.lowered.backward)}
    assert {op_name(made[f"grad_p_cell_weight_{each}"]) for each in ("ih", "hh")} == {"relax.matmul"}


def test_a_loop_is_told_as_one():
    torch.manual_seed(0)
    module, x = LayerNormLstm(), torch.randn(7, 2, 3)
    lowered = lower(module, x)
    assert lowered.check().ok
    text = lowered["rolled"].script()
    assert "step_0, 7 times: 2 carries, 1 xs, 5 constants" in text and text.count("def main") == 2
    assert len(text) < 20_000
    module = add_tvm_dispatch(module, x)
    module(x)
    report = str(explain(module).full)
    assert "1 loops" in report and "7 times: " in report


@pytest.mark.parametrize("steps", [6, 60])
def test_what_a_loop_cannot_do_is_refused_by_its_name(steps):
    """Also where the record is long enough to be rolled up: a sparse tensor has no strides."""

    class Refused(nn.Module):
        def forward(self, x):
            for _ in range(steps):
                x = x.to_sparse().to_dense()
            return x

    with pytest.raises(UnsupportedModule, match="_to_sparse"):
        lower(Refused(), torch.randn(3, requires_grad=True))
